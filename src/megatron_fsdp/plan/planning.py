"""`plan` computes the needs of a run from a model, ranks and a machine; `recommend` chooses the strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import resolve_offload
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, text_of
from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile, Exchange
from megatron_fsdp.plan.machine import Machine, find_machine
from megatron_fsdp.plan.models import ModelSpec, build_meta_model
from megatron_fsdp.plan.parallel import (
    DecoderShare,
    microbatches_in_flight,
    not_modelled,
    share_exchanges,
    share_profile,
)
from megatron_fsdp.plan.replay import INNER, OUTER, Moment, ReplayedStep, exchange_s, replay_step
from megatron_fsdp.plan.setup import ParallelRanks, Ranks, Recompute, Setup, is_count, make_setup
from megatron_fsdp.plan.sharded import (
    PlannedModel,
    UnitModules,
    held_bytes,
    host_step_s,
    offloaded_bytes,
    optimizer_bytes,
    plan_model,
    saving_bytes,
)

_SEQUENCE_LENGTH = 4096
_MOST_TOKENS = 2**30
"""Larger counts could overflow torch's 64-bit sizes."""
_ALMOST = 1.02  # of the fastest: the simpler plan wins


def plan(
    model: ModelSpec,
    ranks: Ranks,
    strategy: str | int | ShardingStrategy = ShardingStrategy.optim_grads_params,
    *,
    machine: Machine | str = "h100",
    **options: Any,
) -> Plan:
    """Plan a run: its memory, communication and time, without hardware and without memory for weights.

    Args:
        model: A preset's name, a Hugging Face config (mapping, file or folder), an import path of a function that
            builds a model, the function, or a model on the meta device.
        ranks: Their number; or sizes by axis: `dp_shard`, `dp_outer`, `tp`, `cp`, `pp`, `ep`.
        strategy: On the sharding axis, as `zero_dp_strategy` of `fully_shard`.
        machine: A preset's name or a machine.
        options: Any further argument of `make_workload` (the model's inputs and units) and any other field of `Setup`
            (strategies, dtypes, batch, optimizer, recomputation), whose members may be given by name.

    Raises:
        ConfigurationError: Something is not known or cannot be; sizes raise its subclass ParallelSizeError.
    """
    own = options.keys() & inspect.signature(make_workload).parameters
    setup = make_setup(ranks, strategy=strategy, **{name: options[name] for name in options.keys() - own})
    workload = make_workload(model, setup.ranks, **{name: options[name] for name in own})
    return plan_workload(workload, setup, machine if isinstance(machine, Machine) else find_machine(machine))


# ---- the compute of a rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """One rank's share of the model and of a microbatch."""

    name: str
    module: nn.Module  # on the meta device; of one tensor- and expert-parallel rank of one pipeline stage
    inputs: Any  # of one microbatch, on the meta device, as `profile_compute` takes them
    tokens: int  # tokens (or samples) of one microbatch on this rank
    loss_fn: Callable[[Any], torch.Tensor] | None = None  # as `profile_compute` takes it
    unit_modules: UnitModules = None  # as `fully_shard` takes them
    total_numel: int = 0  # parameters of the whole model
    share: DecoderShare | None = None  # where formulas stand for the module's forward; None: it is run without memory
    notes: tuple[str, ...] = ()  # assumptions

    @property
    def class_name(self) -> str:
        """The class name of the whole model."""
        return type(self.module if self.share is None else self.share.model).__name__


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
    """Build one rank's share of a model and of a microbatch.

    Args:
        model: As for `plan`.
        ranks: Along each axis.
        sequence_length: Tokens of a sequence, over all context-parallel ranks; None: 4096. Not with `inputs`.
        micro_batch: Sequences per rank and microbatch; None: 1. Not with `inputs`.
        dtype: Of models that are built from a config; None: bfloat16. Functions and models have their own.
        fsdp_unit_modules: As for `fully_shard`.
        inputs: Of one rank and microbatch, on the meta device, for models that do not take tokens.
        loss_fn: Scalar loss of the model's output, for models that return none.
        stage: The pipeline stage to look at; the first keeps most activations.
        name: The name of the model in the report; None: as it is given.
        tokens: How many tokens `inputs` hold; None: as many as the first tensor has samples.

    Raises:
        ConfigurationError: A count is impossible, or without effect, or the model cannot be planned like that.
    """
    for argument, count in (("sequence_length", sequence_length), ("micro_batch", micro_batch)):
        if count is not None and inputs is not None:
            raise ConfigurationError(f"{argument}={count} has no effect on inputs of your own; leave one of them out")
        if count is not None and not (is_count(count) and count <= _MOST_TOKENS):
            raise ConfigurationError(f"invalid {argument}={count!r}: give a whole number from 1 to {_MOST_TOKENS:,}")
    for argument, value in (("loss_fn", loss_fn), ("tokens", tokens)):
        if value is not None and inputs is None:
            raise ConfigurationError(f"{argument} has no effect without inputs; give both, or leave it out")
    module = build_meta_model(model, dtype, default=torch.bfloat16)
    config: Any = getattr(module, "config", None)
    given = model if isinstance(model, str) else getattr(config, "model_type", None) or type(module).__name__
    label, total = name or given, sum(param.numel() for param in module.parameters())
    divided = [f"{axis}={size}" for axis, size in ranks.divided.items()]
    if divided and fsdp_unit_modules is not None:
        raise ConfigurationError(f"fsdp_unit_modules has no effect with {divided[0]}: units are layers; leave it out")
    if stage and not divided:
        raise ConfigurationError(f"stage={stage} does not exist; with pp=1 there is stage 0")
    if inputs is not None:
        if divided:
            raise not_modelled(divided[0], "it has inputs of its own")
        return Workload(label, module, inputs, tokens or _samples(inputs), loss_fn, fsdp_unit_modules, total)
    rows, length = micro_batch or 1, sequence_length or _SEQUENCE_LENGTH
    notes = tuple(_notes(module, length))
    if divided:
        return share_workload(label, DecoderShare(module, ranks, rows, length, stage), notes)
    batch = _token_inputs(module, rows, length)
    return Workload(label, module, batch, rows * length, None, fsdp_unit_modules, total, notes=notes)


def share_workload(name: str, share: DecoderShare, notes: tuple[str, ...] = ()) -> Workload:
    """Build the workload of a rank whose compute follows from formulas."""
    total = sum(param.numel() for param in share.model.parameters())
    return Workload(name, share.module(), None, share.tokens, total_numel=total, share=share, notes=notes)


def _notes(module: nn.Module, sequence_length: int) -> Iterator[str]:
    if not module.training:
        yield "The model is in evaluation mode, so nothing is dropped out; call train()."
    config = getattr(module, "config", None)
    if _labels_rows(module) and getattr(config, "pad_token_id", None) is None:
        yield "The config has no pad_token_id, without which a decoder takes one row (--micro-batch-size 1); set it."
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and sequence_length > longest:
        yield f"The model was made for {longest:,} tokens, and the sequences have {sequence_length:,}."


def _labels_rows(module: nn.Module) -> bool:
    """Return True if a model of transformers takes a label for each row instead of each token."""
    return type(module).__name__.endswith("ForSequenceClassification")


def _token_inputs(module: nn.Module, micro_batch: int, sequence_length: int) -> Mapping[str, Any]:
    """Build tokens and labels on the meta device for a language model of transformers.

    Without a cache of keys and values: it serves generation, and in training would grow when layers are recomputed.
    """
    config: Any = getattr(module, "config", None)
    arguments = inspect.signature(module.forward).parameters
    takes_tokens = hasattr(config, "vocab_size") and getattr(module, "main_input_name", "input_ids") == "input_ids"
    if not takes_tokens or getattr(config, "sub_configs", None) or "labels" not in arguments:
        raise ConfigurationError(
            f"{type(module).__name__} is no language model that takes tokens alone and returns its loss; give inputs= "
            "(tensors on the meta device; on the command line --inputs package.module:function) and, where it returns "
            "no loss, loss_fn= (--loss)"
        )
    tokens = torch.empty((micro_batch, sequence_length), dtype=torch.long, device="meta")
    without_cache = {"use_cache": False} if "use_cache" in arguments else {}
    decoded = {"decoder_input_ids": tokens} if "decoder_input_ids" in arguments else {}
    labels = tokens
    if _labels_rows(module):
        kind = config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")
        is_class = kind == "single_label_classification"
        shape = (micro_batch,) if is_class or config.num_labels == 1 else (micro_batch, config.num_labels)
        labels = torch.empty(shape, dtype=torch.long if is_class else torch.get_default_dtype(), device="meta")
    return {"input_ids": tokens, "labels": labels, **decoded, **without_cache}


def _samples(inputs: Any) -> int:
    """Return the number of samples of a microbatch: the first dimension of the first tensor."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    real = next((tensor for tensor in tensors if not tensor.is_meta), None)
    if real is not None or isinstance(inputs, list):
        what = f"are a {type(inputs).__name__}" if real is None else f"lie on {real.device}"
        raise ConfigurationError(
            f"inputs {what}; give tensors on the meta device, one, a tuple (positional) or a dict (by name)"
        )
    count = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)
    if not count:
        raise ConfigurationError("inputs hold no tensor with a dimension of samples; give tensors on the meta device")
    return int(count)


# ---- the plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank over a step, in bytes."""

    compute_weights: int  # weights that forward and backward use
    main_weights: int  # weights that the optimizer updates, where they are memory of their own
    main_gradients: int  # accumulated gradients; only from a backward until they are cleared
    optimizer: int  # optimizer state, counters of steps included
    module_buffers: int  # buffers of modules, which every rank holds
    input_bytes: int  # inputs of a microbatch
    offloaded_bytes: int  # of the first four kinds, offloaded and not counted there
    saving_bytes: int  # host memory that a checkpoint in the background takes for its copy; saving at once takes none
    peak: Moment  # the moment of the step that holds most on top of all but main gradients

    @property
    def held(self) -> dict[str, int]:
        """The bytes held when the optimizer steps, by name."""
        names = ("compute_weights", "main_weights", "main_gradients", "optimizer", "module_buffers")
        return {name: getattr(self, name) for name in names}

    @property
    def held_bytes(self) -> int:
        """The sum of bytes held when the optimizer steps."""
        return sum(self.held.values())

    @property
    def resting_bytes(self) -> int:
        """The bytes held even after gradients are cleared."""
        return self.held_bytes - self.main_gradients

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the rank holds at one time."""
        return self.resting_bytes + self.input_bytes + self.peak.total_bytes


@dataclass(frozen=True)
class AxisTraffic:
    """The communication of one rank along one axis in one step."""

    axis: str  # "dp_shard", "dp_outer", "tp", "cp", "ep" or "pp"
    gathers: int  # collectives that bring weights (or activations) together
    reductions: int  # collectives that add up
    sent_bytes: int  # by this rank
    seconds: float  # that they take on their link


@dataclass(frozen=True)
class Plan:
    """A planned run: memory, traffic and time of one rank."""

    workload: Workload
    model: PlannedModel
    machine: Machine
    profile: ComputeProfile  # activations and operations of a microbatch
    step: ReplayedStep  # the replayed one of this rank
    memory: RankMemory
    traffic: tuple[AxisTraffic, ...]  # per axis

    @property
    def setup(self) -> Setup:
        """The ranks, strategy and options."""
        return self.model.setup

    @property
    def fits(self) -> bool:
        """True if the peak fits into a device's usable memory, and offloaded state into the host's."""
        return self.memory.peak_bytes <= self.machine.usable_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """True if offloaded state fits into the host's memory."""
        return self.memory.offloaded_bytes <= self.machine.host_memory_bytes

    @property
    def host_step_s(self) -> float:
        """The seconds per step that offloaded state takes; 0 without any."""
        return host_step_s(self.model, self.machine)

    @property
    def hides_offload_from_tokens(self) -> float | None:
        """The tokens per rank and step above which `host_step_s` is at most a tenth of the compute."""
        tokens = self.workload.tokens * self.setup.microbatches
        return tokens * self.host_step_s / (_SMALL_SHARE * self.step.compute_s) or None

    @property
    def bubble(self) -> float:
        """The idle time of a pipeline over its work time, (p - 1) / (v m) (Narayanan et al. 2021)."""
        setup = self.setup
        return (setup.ranks.pp - 1) / (setup.virtual_stages * setup.microbatches)

    @property
    def step_s(self) -> float:
        """The seconds of a step of the busiest pipeline stage, with the bubble."""
        share = self.workload.share
        slowdown = 1.0 if share is None else share.slowdown(self.setup)
        return self.step.seconds * slowdown * (1 + self.bubble)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        ranks = self.setup.ranks
        sequences = ranks.data_parallel * ranks.cp
        return self.workload.tokens * sequences * self.setup.microbatches / self.step_s

    @property
    def model_flops(self) -> float:
        """The FLOPs of one microbatch on this rank without recomputation (the F of MFU)."""
        if self.workload.share is not None:
            return self.workload.share.model_flops
        return self.profile.forward_flops + self.profile.backward_flops

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions, as sentences."""
        found, share, muon = list(self.workload.notes), self.workload.share, self.model.muon
        if share is not None:
            found += share.notes(self.setup)
        if any(group.offloads_compute for group in self.model.groups):
            found.append("Copies of offloaded compute weights, before they are gathered, are not timed.")
        if self.setup.keep_fp8_transpose_cache and self.setup.policy.weight_formats != {"*": "fp8_compute"}:
            limit = "The trainer keeps transposed codes of all weights or of none, so the flags leave them out; "
            found.append(f"{limit}fully_shard(keep_fp8_transpose_cache=True) keeps these.")
        if muon is not None:
            tokens = self.workload.tokens * self.setup.microbatches
            found.append(f"Muon: {muon.summary(self.machine, tokens, self.step.compute_s)}.")
        return tuple(found)

    @property
    def utilisation(self) -> float:
        """Model FLOPs over the devices' peak in the time of a step (MFU; Chowdhery et al., PaLM, 2022)."""
        return self.model_flops * self.setup.microbatches / (self.step_s * self.machine.flops)

    @property
    def hidden_from_tokens(self) -> float | None:
        """Tokens per rank and microbatch above which compute hides the communication of the sharding axis.

        Compute grows with the number of samples, and communication does not. None without communication.
        """
        travel_s = sum(axis.seconds for axis in self.traffic if axis.axis == "dp_shard")
        return self.workload.tokens * travel_s / self.step.compute_s or None

    @property
    def exposed_fraction(self) -> float:
        """The fraction of the step that waits for data-parallel collectives."""
        return self.step.exposed_s / self.step.seconds if self.step.seconds else 0.0


_SMALL_SHARE = 0.1


def plan_workload(workload: Workload, setup: Setup, machine: Machine, profile: ComputeProfile | None = None) -> Plan:
    """Plan a run of a workload on a machine; a `profile` of a plan with equal units and recomputation is reused."""
    model, share = plan_model(workload.module, setup, workload.unit_modules), workload.share
    names = [path for unit in model.units for path in unit.modules]
    if profile is None or set(profile.unit_names) != set(names):
        profile = _profile(workload, model, names)
    model = replace(model, used=profile.used)
    exchanges: tuple[Exchange, ...] = ()
    saved_microbatches = 0.0
    if share is not None:
        if len(share.layers) + share.is_first + share.is_last < setup.virtual_stages:
            raise ConfigurationError(f"virtual_stages={setup.virtual_stages} need as many layers on a rank; give fewer")
        exchanges = share_exchanges(share, setup)
        saved_microbatches = microbatches_in_flight(setup, share.stage) - 1
    step = replay_step(model, profile, machine, exchanges, saved_microbatches)
    buffers, saved = dict(workload.module.named_buffers()), workload.module.state_dict()
    memory = RankMemory(
        *held_bytes(model.groups),
        optimizer_bytes(model),
        sum(buffer.nbytes for buffer in buffers.values()),
        profile.input_bytes,
        offloaded_bytes(model),
        saving_bytes(model) + sum(saved[name].nbytes for name in buffers.keys() & saved.keys()),
        step.peak,
    )
    return Plan(workload, model, machine, profile, step, memory, _traffic(step, exchanges, setup, machine))


def _profile(workload: Workload, model: PlannedModel, names: Sequence[str]) -> ComputeProfile:
    """Profile a microbatch of units' modules, by formulas or by running it once on the meta device."""
    setup = model.setup
    if workload.share is not None:
        return share_profile(workload.share, setup, workload.module, names)
    try:
        return profile_compute(
            workload.module,
            workload.inputs,
            unit_names=names,
            loss_fn=workload.loss_fn,
            kernels="cpu" if setup.backend == "gloo" else "cuda",
            recompute=setup.recompute,
        )
    except MegatronFSDPError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{workload.class_name} cannot be run without memory on what it was given ("
            f"{' '.join(text_of(error).split())[:300]}); give other inputs= (--inputs) and loss_fn= (--loss), on which "
            f"its forward does not depend on values{''.join(f'; {note}' for note in workload.notes).rstrip('.')}"
        ) from error


def _traffic(
    step: ReplayedStep, exchanges: Sequence[Exchange], setup: Setup, machine: Machine
) -> tuple[AxisTraffic, ...]:
    """Add up the collectives of a step by axis, those of data parallelism first."""
    sent = [(each.axis, each.is_gather, 1, each.sent_bytes, each.end_s - each.start_s) for each in step.transfers]
    for each in exchanges:
        seconds = exchange_s(each, setup, machine)
        sent.append((each.axis, False, setup.microbatches * each.count, each.sent_bytes, seconds))
    found = []
    for axis in dict.fromkeys([INNER, OUTER, *(row[0] for row in sent)]):
        own = [row[1:] for row in sent if row[0] == axis]
        if own:
            gathers = sum(count for is_gather, count, _, _ in own if is_gather)
            reductions = sum(count for is_gather, count, _, _ in own if not is_gather)
            num_bytes = sum(count * num_bytes for _, count, num_bytes, _ in own)
            seconds = sum(count * seconds for _, count, _, seconds in own)
            found.append(AxisTraffic(axis, gathers, reductions, num_bytes, seconds))
    return tuple(found)


# ---- the choice among plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recommendation:
    """The plans that were tried, and the best of them."""

    plans: tuple[Plan, ...]  # all that were tried, the simple ones first
    # the simplest of those that fit and are at most 2 % slower than the fastest; None where none fits
    best: Plan | None

    @property
    def smallest(self) -> Plan:
        """The plan that needs the least memory."""
        return min(self.plans, key=lambda plan: plan.memory.peak_bytes)


def recommend(
    workload: Workload, setup: Setup, machine: Machine, recomputes: Sequence[Recompute] = ("none", "full")
) -> Recommendation:
    """Plan every strategy on every useful division of the data-parallel ranks, with and without recomputation.

    If nothing fits, state on the host is planned too: the optimizer's state, then main weights, then compute weights.

    The setup gives tensor, context, pipeline and expert ranks, dtypes, optimizer and the number of data-parallel ranks;
    strategies, the division into inner and outer ranks and recomputation vary. No possible arrangement is an error.
    """
    plans: list[Plan] = []
    problems: list[str] = []
    for recompute in recomputes:
        profile: ComputeProfile | None = None
        for candidate in _candidates(replace(setup, recompute=recompute), machine):
            try:
                plans.append(plan_workload(workload, candidate, machine, profile))
                profile = plans[-1].profile
            except ConfigurationError as error:
                problems.append(str(error))
    if not any(plan.fits for plan in plans):
        plans += _plans_with_offload(workload, plans, machine)
    if not plans:
        raise ConfigurationError(f"nothing can be recommended, since no arrangement is possible: {problems[0]}")
    fitting = [plan for plan in plans if plan.fits]
    fastest = min((plan.step_s for plan in fitting), default=0.0)
    best = next((plan for plan in fitting if plan.step_s <= fastest * _ALMOST), None)
    return Recommendation(tuple(plans), best)


def _plans_with_offload(workload: Workload, plans: Sequence[Plan], machine: Machine) -> list[Plan]:
    """Plan the smallest arrangement of each recomputation with more and more state on the host."""
    found: list[Plan] = []
    for recompute in dict.fromkeys(plan.setup.recompute for plan in plans):
        own = [plan for plan in plans if plan.setup.recompute == recompute and not plan.setup.offload]
        sharded = [plan for plan in own if plan.setup.strategy is ShardingStrategy.optim_grads_params]
        for given, among in ((["optimizer_state"], own), (["main_weights"], own), ("all", sharded)):
            possible = [plan for plan in among if plan.setup.may_offload(resolve_offload(given, plan.setup.strategy))]
            if possible:
                least = min(possible, key=lambda plan: plan.memory.peak_bytes)
                setup = replace(least.setup, offload=resolve_offload(given, least.setup.strategy))
                found.append(plan_workload(workload, setup, machine, least.profile))
    return found


def _candidates(setup: Setup, machine: Machine) -> Iterator[Setup]:
    """Yield flat strategies first, then hybrid ones with a sharding axis of one node, two nodes, four, and so on."""
    ranks, sharded = setup.ranks, ShardingStrategy.optim_grads_params
    data_ranks = ranks.dp_shard * ranks.dp_outer
    flat = replace(
        setup,
        ranks=replace(ranks, dp_shard=data_ranks, dp_outer=1),
        outer_strategy=ShardingStrategy.no_shard,
    )
    # Experts that are divided over ranks are sharded with everything else.
    for strategy in ShardingStrategy if ranks.ep == 1 else (sharded,):
        yield replace(flat, strategy=strategy)
    inner = max(1, machine.devices_per_node // (ranks.tp * ranks.cp))
    while inner < data_ranks:
        if data_ranks % inner == 0 and (inner * ranks.cp) % ranks.ep == 0 and inner > 1:
            hybrid = replace(ranks, dp_shard=inner, dp_outer=data_ranks // inner)
            for outer in (ShardingStrategy.no_shard, ShardingStrategy.optim):
                yield replace(setup, ranks=hybrid, strategy=sharded, outer_strategy=outer)
        inner *= 2


def ranks_that_fit(plan: Plan) -> int | None:
    """Estimate the ranks that the same plan would need to fit, with a shard of all state on each.

    Persistent memory and the optimizer's borrowed memory shrink with the ranks; gathered weights, buckets and
    activations do not. None if more ranks do not help, or the strategy does not shard all state.
    """
    setup, memory = plan.setup, plan.memory
    if setup.strategy is not ShardingStrategy.optim_grads_params or setup.ranks.dp_outer > 1:
        return None
    shared = memory.resting_bytes - memory.module_buffers + memory.peak.gradient_bytes
    shared += memory.peak.passing_bytes
    left = plan.machine.usable_bytes - (memory.peak_bytes - shared)
    if left <= 0:
        return None
    nodes = -(-setup.ranks.world * shared // (left * plan.machine.devices_per_node))
    return max(nodes, 1) * plan.machine.devices_per_node
