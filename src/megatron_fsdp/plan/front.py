"""`plan`: one call from a model and a number of ranks to what a run will need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from megatron_fsdp.config.engine_options import MemoryOptions
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.config.strategy import ShardingStrategy, resolve_strategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.machine import Machine, find_machine
from megatron_fsdp.plan.models import ModelSpec, build_meta_model, comes_from_config
from megatron_fsdp.plan.names import nearest_name
from megatron_fsdp.plan.planned_model import UnitModules
from megatron_fsdp.plan.planning import Plan, plan_workload
from megatron_fsdp.plan.recompute import Recompute
from megatron_fsdp.plan.setup import OPTIMIZERS, Accumulation, Backend, OptimizerKind, ParallelRanks, Setup
from megatron_fsdp.plan.share import share_of_rank
from megatron_fsdp.plan.workload import Workload

Ranks = int | Mapping[str, int] | ParallelRanks
_Choice = TypeVar("_Choice", bound=Enum)
_SEQUENCE_LENGTH = 4096
_MOST_TOKENS = 2**30
"""More would not be counted right: torch's sizes are 64-bit numbers."""


def plan(
    model: ModelSpec,
    ranks: Ranks,
    strategy: str | int | ShardingStrategy = ShardingStrategy.optim_grads_params,
    *,
    outer_strategy: str | int | ShardingStrategy = ShardingStrategy.no_shard,
    machine: Machine | str = "h100",
    sequence_length: int | None = None,
    micro_batch: int | None = None,
    microbatches: int = 1,
    recompute: Recompute = "none",
    dtype: torch.dtype | None = None,
    policy: MixedPrecisionPolicy | None = None,
    optimizer: OptimizerKind | str = "adamw",
    backend: Backend | str = Backend.NCCL,
    accumulation: Accumulation | str = Accumulation.EVERY,
    memory: MemoryOptions | None = None,
    fsdp_unit_modules: UnitModules = None,
    inputs: Any = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    stage: int = 0,
) -> Plan:
    """Work out what a run will need, without hardware and without memory for weights.

    Args:
        model: A preset's name, a Hugging Face config (mapping, file or folder), an import path of a function that
            builds a model, the function, or a model on the meta device.
        ranks: Their number; or sizes by axis: `dp_shard`, `dp_outer`, `tp`, `cp`, `pp`, `ep`.
        strategy: On the sharding axis, as `zero_dp_strategy` of `fully_shard`.
        outer_strategy: On the outer axis, as `outer_dp_sharding_strategy`.
        machine: A preset's name or a machine.
        sequence_length: Tokens of a sequence, over all context-parallel ranks; None: 4096. Not with `inputs`.
        micro_batch: Sequences per rank and microbatch; None: 1. Not with `inputs`.
        microbatches: Per optimizer step.
        recompute: "none", "full" (every unit), "attention" or "mlp".
        dtype: Of models that are built from a config; None: bfloat16. Functions and models have their own.
        policy: Dtypes of main weights and gradients; None: the default of `fully_shard`.
        optimizer: One of `OPTIMIZERS` or its name.
        backend: "nccl" or "gloo".
        accumulation: When gradients of several microbatches are reduced: "every", "outer" or "last".
        memory: How gathered weights borrow memory; None: the default of `fully_shard`.
        fsdp_unit_modules: As for `fully_shard`.
        inputs: Of one rank and microbatch, on the meta device, for models that do not take tokens.
        loss_fn: Scalar loss of the model's output, for models that return none.
        stage: The pipeline stage to look at; the first keeps most activations.

    Raises:
        ConfigurationError: Something is not known or cannot be; sizes raise its subclass ParallelSizeError.
    """
    setup = Setup(
        resolve_ranks(ranks),
        resolve_strategy(strategy, "strategy"),
        resolve_strategy(outer_strategy, "outer_strategy"),
        policy or MixedPrecisionPolicy(),
        memory or MemoryOptions(),
        microbatches=microbatches,
        optimizer=optimizer if isinstance(optimizer, OptimizerKind) else find_optimizer(optimizer),
        recompute=recompute,
        backend=_member(Backend, backend, "backend"),
        accumulation=_member(Accumulation, accumulation, "accumulation"),
    )
    workload = make_workload(
        model,
        setup.ranks,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        dtype=dtype,
        fsdp_unit_modules=fsdp_unit_modules,
        inputs=inputs,
        loss_fn=loss_fn,
        stage=stage,
    )
    return plan_workload(workload, setup, machine if isinstance(machine, Machine) else find_machine(machine))


def _member(kind: type[_Choice], given: object, argument: str) -> _Choice:
    """A member of an enumeration, or the one of this name."""
    names = {each.name.lower(): each for each in kind}
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given.lower() in names:
        return names[given.lower()]
    raise ConfigurationError(f"{argument}={given!r} is not known; give one of {', '.join(names)}")


def make_workload(
    model: ModelSpec,
    ranks: ParallelRanks,
    *,
    sequence_length: int | None = None,
    micro_batch: int | None = None,
    dtype: torch.dtype | None = None,
    fsdp_unit_modules: UnitModules = None,
    inputs: Any = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    stage: int = 0,
    name: str | None = None,
    tokens: int | None = None,
) -> Workload:
    """One rank's share of a model and of a microbatch; arguments as for `plan`.

    With inputs of their own, `tokens` says how many tokens they hold (None: as many as the first tensor has samples);
    `name` is what to call the model.

    Raises:
        ConfigurationError: The model is not known, or cannot be divided like that.
    """
    for argument, count in (("sequence_length", sequence_length), ("micro_batch", micro_batch)):
        if count is not None and inputs is not None:
            raise ConfigurationError(f"{argument}={count} has no effect on inputs of your own; leave one of them out")
        if count is not None and not (_is_whole(count) and 1 <= count <= _MOST_TOKENS):
            raise ConfigurationError(f"invalid {argument}={count!r}: give a whole number from 1 to {_MOST_TOKENS:,}")
    module = build_meta_model(model, (dtype or torch.bfloat16) if comes_from_config(model) else dtype)
    kind = getattr(getattr(module, "config", None), "model_type", None)
    label = name or (model if isinstance(model, str) else str(kind or type(module).__name__))
    if inputs is None:
        length = _SEQUENCE_LENGTH if sequence_length is None else sequence_length
        return share_of_rank(label, module, ranks, micro_batch or 1, length, fsdp_unit_modules, stage)
    _check_inputs(inputs)
    for axis in ("tp", "cp", "pp"):
        if getattr(ranks, axis) > 1:
            raise ConfigurationError(
                f"{axis}={getattr(ranks, axis)} divides language models of transformers only; with inputs= of your "
                "own, give the model as one rank of that axis computes it, and leave the axis out"
            )
    return Workload(
        label,
        module,
        inputs,
        _samples(inputs) if tokens is None else tokens,
        loss_fn,
        fsdp_unit_modules,
        sum(param.numel() for param in module.parameters()),
    )


def resolve_ranks(ranks: Ranks) -> ParallelRanks:
    """Sizes of all axes.

    Raises:
        ParallelSizeError: A size cannot be.
        ConfigurationError: There is no such axis.
    """
    if isinstance(ranks, ParallelRanks):
        return ranks
    if isinstance(ranks, int):
        return ParallelRanks(ranks)
    if not _is_mapping(ranks) or not ranks:
        raise ConfigurationError(f"ranks={ranks!r}; give their number, or sizes by axis such as dict(dp_shard=8)")
    known = list(ParallelRanks.__dataclass_fields__)
    for name in ranks:
        if name not in known:
            raise ConfigurationError(f"there is no axis {name!r}; {nearest_name(name, known)}")
    return ParallelRanks(**{"dp_shard": 1, **ranks})


def find_optimizer(name: str) -> OptimizerKind:
    """An optimizer by name.

    Raises:
        ConfigurationError: There is none of this name.
    """
    if name not in OPTIMIZERS:
        raise ConfigurationError(f"optimizer {name!r} is not known; {nearest_name(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _check_inputs(inputs: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    real = next((tensor for tensor in tensors if not tensor.is_meta), None)
    if real is not None or isinstance(inputs, list):
        what = f"are a {type(inputs).__name__}" if real is None else f"lie on {real.device}"
        raise ConfigurationError(
            f"inputs {what}; give tensors on the meta device, one, a tuple (positional) or a dict (by name)"
        )


def _samples(inputs: Any) -> int:
    """Samples of a microbatch: the first dimension of the first tensor."""
    leaves = tree_leaves(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if first is None or not first.shape[0]:
        raise ConfigurationError("inputs hold no tensor with a dimension of samples; give tensors on the meta device")
    return int(first.shape[0])
