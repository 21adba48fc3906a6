"""What one rank computes of a language model that tensor, context, pipeline and expert parallelism divide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.context_parallel_share import planned_attention, take_context_parallel_part
from megatron_fsdp.plan.decoder_parts import DecoderParts, copy_of_modules, decoder_parts, itemsize_of, text_config
from megatron_fsdp.plan.expert_share import expert_exchanges
from megatron_fsdp.plan.experts_stand_in import fused_experts
from megatron_fsdp.plan.pipeline_share import (
    EndOfStage,
    Stage,
    hidden_states,
    received_bytes,
    stage_inputs,
    take_stage,
)
from megatron_fsdp.plan.planned_model import UnitModules
from megatron_fsdp.plan.setup import ParallelRanks
from megatron_fsdp.plan.tensor_parallel_share import take_tensor_parallel_part
from megatron_fsdp.plan.workload import Exchange, Workload, language_workload, unit_around, without_cache
from megatron_fsdp.sharding.units import find_units


def share_of_rank(
    name: str,
    module: nn.Module,
    ranks: ParallelRanks,
    micro_batch: int,
    sequence_length: int,
    unit_modules: UnitModules,
    stage: int,
) -> Workload:
    """One rank's share of a model and of a microbatch: of the first tensor- and context-parallel rank.

    Args:
        name: For people.
        module: The whole model, on the meta device; it stays as it is.
        ranks: Along each axis.
        micro_batch: Sequences per microbatch.
        sequence_length: Tokens of each, over all context-parallel ranks.
        unit_modules: As `fully_shard` takes them.
        stage: Which pipeline stage.

    Raises:
        ConfigurationError: The model cannot be divided like that.
        ParallelSizeError: The ranks do not divide layers, heads, experts or tokens.
    """
    _check(module, ranks, stage)
    whole = language_workload(name, module, micro_batch, sequence_length, unit_modules)
    tokens = micro_batch * (sequence_length // ranks.cp)
    if ranks.tp == ranks.cp == ranks.pp == 1:
        if ranks.ep == 1:
            return whole
        found = expert_exchanges(module, ranks.ep, tokens)
        return replace(
            whole, exchanges=_by_unit(module, unit_modules, found), notes=(*whole.notes, *_notes(module, ranks))
        )
    own = copy_of_modules(module)
    place = Stage(stage, ranks.pp)
    parts = decoder_parts(own, "pp") if ranks.pp > 1 or ranks.cp > 1 else None
    if ranks.pp > 1 and parts is not None:
        take_stage(own, parts, place, micro_batch, sequence_length // ranks.cp)
    exchanges = [*_of_pipeline(own, parts, place, tokens)]
    exchanges += expert_exchanges(own, ranks.ep, tokens) if ranks.ep > 1 else ()
    exchanges += take_tensor_parallel_part(own, ranks.tp, tokens) if ranks.tp > 1 else ()
    if ranks.cp > 1 and parts is not None:
        exchanges += take_context_parallel_part(own, parts, ranks.cp, ranks.tp, micro_batch, sequence_length)
    return replace(
        whole,
        module=own,
        inputs={**stage_inputs(own, place, micro_batch, sequence_length // ranks.cp), **without_cache(own)},
        tokens=tokens,
        loss_fn=_end(own, place, micro_batch, sequence_length // ranks.cp),
        received_bytes=received_bytes(own, place, micro_batch, sequence_length // ranks.cp),
        exchanges=_by_unit(own, unit_modules, exchanges),
        stage=stage,
        surroundings=partial(planned_attention, ranks.cp) if ranks.cp > 1 else None,
        notes=(*whole.notes, *_notes(module, ranks)),
    )


def _check(module: nn.Module, ranks: ParallelRanks, stage: int) -> None:
    if not 0 <= stage < ranks.pp:
        raise ParallelSizeError(f"stage={stage} does not exist; with pp={ranks.pp} there are 0 to {ranks.pp - 1}")
    if ranks.ep > 1 and ranks.tp > 1:
        raise ConfigurationError(
            f"ep={ranks.ep} and tp={ranks.tp} cannot divide one model: tensor-parallel ranks share the experts among "
            "themselves; leave one of them out"
        )
    if ranks.ep > 1 and not fused_experts(module):
        raise ConfigurationError(
            f"{type(module).__name__} has no fused experts, so ep={ranks.ep} ranks have nothing to divide; use ep=1"
        )


def _end(own: nn.Module, stage: Stage, rows: int, tokens: int) -> EndOfStage | None:
    if stage.count == 1:
        return None
    return EndOfStage(None if stage.is_last else hidden_states(own, rows, tokens))


def _of_pipeline(own: nn.Module, parts: DecoderParts | None, stage: Stage, tokens: int) -> list[Exchange]:
    """Hidden states go to the next stage, their gradients to the one before."""
    if stage.count == 1 or parts is None:
        return []
    path = f"{parts.base}.{parts.layers}"
    names = [f"{path}.{name}" for name, _ in own.get_submodule(path).named_children()]
    sent = tokens * text_config(own).hidden_size * itemsize_of(own)
    forward = [] if stage.is_last else [Exchange("pp", names[-1], sent, False)]
    backward = [] if stage.is_first else [Exchange("pp", names[0], sent, True)]
    return forward + backward


def _by_unit(module: nn.Module, unit_modules: UnitModules, exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """Exchanges under the names of units, equal ones counted."""
    given: Any = unit_modules
    units = [unit.name for unit in find_units(module, given).units]
    counts: dict[Exchange, int] = {}
    for exchange in exchanges:
        one = exchange.but(unit=unit_around(exchange.unit, units), count=1)
        counts[one] = counts.get(one, 0) + exchange.count
    return tuple(one.but(count=count) for one, count in counts.items())


def _notes(module: nn.Module, ranks: ParallelRanks) -> tuple[str, ...]:
    notes = []
    if ranks.tp > 1:
        notes.append(
            "Tensor parallelism follows transformers' plan without sequence parallelism, one all-reduce of an input's "
            "gradient for each column-wise layer; the first rank is shown, which has the largest part of a vocabulary."
        )
        if fused_experts(module):
            notes.append(
                "Products of experts are counted for all routes of the tensor-parallel ranks, though each computes its "
                "own only: compute is counted too high there."
            )
    if ranks.cp > 1:
        notes.append(
            "Context-parallel ranks gather keys and values of all ranks once per layer; causal attention is counted as "
            "if every query saw every key, as without context parallelism."
        )
    if ranks.pp > 1:
        notes.append(
            "Pipeline stages run 1F1B with one stage per rank, sending hidden states takes time of the stage, and each "
            "microbatch of a step has buffers of its own for what other stages send, as in torch's schedules."
        )
        if getattr(text_config(module), "tie_word_embeddings", False):
            notes.append("Tied embeddings are held by both ends; the exchange of their gradients is not counted.")
    if ranks.ep > 1:
        notes.append(
            "Routing is balanced: each expert-parallel rank gets as many rows as it sends; counts of rows travel free."
        )
    return tuple(notes)
