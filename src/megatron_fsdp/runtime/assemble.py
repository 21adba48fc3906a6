"""Everything that happens at wrap time: check the model, find units, shard, connect the hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.buffer.collectives import Traffic
from megatron_fsdp.buffer.share import VARIABLE as SHARED_MEMORY_VARIABLE
from megatron_fsdp.buffer.share import resolve_shared_memory
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError
from megatron_fsdp.memory_options import MemoryOptions
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.notices import warn_caller
from megatron_fsdp.placement import ShardingStrategy, placements_for
from megatron_fsdp.runtime.agreement import agree_over
from megatron_fsdp.runtime.build import build_units
from megatron_fsdp.runtime.delays import DelayObserver, resolve_delays
from megatron_fsdp.runtime.domain import make_domain
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.engine_parts import EngineParts
from megatron_fsdp.runtime.expert_names import find_expert_names
from megatron_fsdp.runtime.finite_check import FiniteCheck
from megatron_fsdp.runtime.fp32_sums import refuse_without_reduce_scatter, warn_without_16_bits
from megatron_fsdp.runtime.fused_linear import fuse_weight_gradients
from megatron_fsdp.runtime.hang_settings import FOLDER_VARIABLE, HangSettings, resolve_hang_log
from megatron_fsdp.runtime.large_gradients import LargeGradientCheck
from megatron_fsdp.runtime.lifetimes import resolve_check_lifetimes
from megatron_fsdp.runtime.match_ranks import differing_duplicates, match_ranks
from megatron_fsdp.runtime.memory_plan import plan_memory
from megatron_fsdp.runtime.module_checks import EMPTY, check_module
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.runtime.state_dicts import register_load_hooks, register_state_dict_hooks
from megatron_fsdp.runtime.structure import StructureCheck
from megatron_fsdp.runtime.sync import SyncMode
from megatron_fsdp.runtime.unit_grouping import Grouping
from megatron_fsdp.runtime.verify_ranks import RankVerifier
from megatron_fsdp.runtime.verify_steps import StepVerifier
from megatron_fsdp.unit.tensor_parallel import part_of
from megatron_fsdp.unit.unit import Unit
from megatron_fsdp.units import UnitPlan, plan_lines


@dataclass(frozen=True)
class Switches:
    """What the caller chose for one model, checked.

    Attributes:
        strategy: On the sharding axis.
        outer_strategy: On the outer axis, where there is one.
        policy: Dtypes.
        overlap_grad_reduce: Reduce during backward; strategies 2 and 3 always do.
        overlap_param_gather: Gather ahead; strategy 3 always does.
        average_in_collective: Let the collective average.
        calculate_per_token_loss: Sum gradients, without a factor.
        check_finite: Look for NaN and infinity in every gradient.
        memory: How memory is borrowed and how far to gather ahead.
        init_meta: Initialise what is on the meta device; "empty": only give its parameters memory.
        reduce_scatter_with_fp32_accumulation: Exchange gradients and add them up locally, in float32.
        find_unused_parameters: Agree at every sync on which parameters were used.
        scales_first: Scale gradients before they travel, not after.
        numel_multiple: What the elements of every trainable group are padded to a multiple of.
        fp32_patterns: `fnmatch` patterns of the parameters whose gradients are accumulated in float32.
        verify_ranks_s: Compare ranks before they communicate and wait so long for each; 0.0: do not.
        verify_each_step: Compare them once a step, after they have communicated.
        check_large: Look for unexpectedly large values in every gradient.
        own_groups: Communicate over process groups that the model's own collectives do not use.
        fuses_weight_gradients: Let linears write weight gradients straight into buckets.
        delays_weight_gradients: Let them compute weight gradients at the end of backward, where all units are reduced.
    """

    strategy: ShardingStrategy
    outer_strategy: ShardingStrategy
    policy: MixedPrecisionPolicy
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    average_in_collective: bool
    calculate_per_token_loss: bool
    check_finite: bool
    memory: MemoryOptions
    init_meta: bool | str = False
    reduce_scatter_with_fp32_accumulation: bool = False
    verify_ranks_s: float = 0.0
    verify_each_step: bool = False
    find_unused_parameters: bool = False
    scales_first: bool = False
    numel_multiple: int = 1
    fp32_patterns: tuple[str, ...] = ()
    check_large: bool = False
    own_groups: bool = False
    fuses_weight_gradients: bool = False
    delays_weight_gradients: bool = False


@dataclass(frozen=True)
class Assembly:
    """A sharded model.

    Attributes:
        engine: Runs it.
        plan: Its units.
        plan_lines: The units, for people.
        handles: The hooks on modules and parameters.
        state_dict_handles: The hooks that describe shards in state dicts.
        device: Where the shards live.
        hang_settings: The log that the environment asks for; None: it asks for none.
        fused_linears: How many linears write their weight gradients straight into buckets.
    """

    engine: Engine
    plan: UnitPlan
    plan_lines: tuple[str, ...]
    handles: tuple[RemovableHandle, ...]
    state_dict_handles: tuple[RemovableHandle, ...]
    device: torch.device
    hang_settings: HangSettings | None = None
    fused_linears: int = 0


def assemble(
    module: nn.Module,
    grouping: Grouping,
    switches: Switches,
    index: FSDPDistributedIndex,
    device: torch.device,
    mode: SyncMode,
    backward_finished: Callable[[], None],
) -> Assembly:
    """Shard a model in place.

    Args:
        module: The model.
        grouping: Which parameters are gathered and reduced together.
        switches: What the caller chose.
        index: Mesh and process groups.
        device: Where the shards are to live.
        mode: When gradients are reduced; shared with the caller.
        backward_finished: Called at the end of each backward.

    Raises:
        ConfigurationError: The model cannot be sharded as it is.
    """
    sharding = _sharding(switches, index, device)
    plan, hang_settings = _plan_together(module, grouping, switches, sharding)
    _move_buffers(module, device)
    _match_ranks(module, sharding)
    _warn_of_missing_experts(module, sharding)
    lines = tuple(plan_lines(plan, {name: param.numel() for name, param in module.named_parameters()}))
    own_groups = None
    if switches.own_groups:
        sharding, own_groups = sharding.over_own_groups()
    if resolve_shared_memory():
        sharding = sharding.over_shared_memory()
    bucket_numel = grouping.cut_numel(sharding.dense.num_ranks)
    units = build_units(module, plan, sharding, bucket_numel, leaves_empty=switches.init_meta == EMPTY)
    _warn_of_narrowing(units)
    if switches.reduce_scatter_with_fp32_accumulation and sharding.dense.num_ranks > 1:
        warn_without_16_bits(
            [group.plan.precision for unit in units for group in unit.groups if group.gradients is not None]
        )
    reduces_early = switches.overlap_grad_reduce or switches.strategy >= ShardingStrategy.optim_grads
    reduces_early = reduces_early and not switches.delays_weight_gradients
    memory = plan_memory(switches.memory, reduces_early, [unit.group_plans for unit in units])
    engine = grouping.make_engine(EngineParts(units, memory, mode, sharding, backward_finished))
    engine.own_groups = own_groups
    if sharding.experts is not None and index.expt_device_mesh is not None:
        engine.expert_names = find_expert_names(engine.groups(), sharding.experts, index.expt_device_mesh)
    _add_gradient_checks(engine, switches, device)
    _add_watchers(engine, switches, sharding)
    modules = {index: module.get_submodule(spec.name) for index, spec in enumerate(plan.units) if spec.is_module}
    handles = (*grouping.connect(engine, modules), *register_load_hooks(engine, module))
    engine.structure = StructureCheck(module, units)
    fused = fuse_weight_gradients(engine, module) if switches.fuses_weight_gradients else 0
    return Assembly(
        engine,
        plan,
        lines,
        handles,
        tuple(register_state_dict_hooks(engine, module)),
        device,
        hang_settings,
        fused,
    )


def _add_watchers(engine: Engine, switches: Switches, sharding: Sharding) -> None:
    """What compares ranks, checks memory or holds things up, where it was asked for."""
    if switches.verify_ranks_s and sharding.dense.group is not None:
        make_verifier = StepVerifier if switches.verify_each_step else RankVerifier
        labels = [unit.label for unit in engine.units]
        engine.executor.verify_with(make_verifier(sharding.dense.group, labels, switches.verify_ranks_s))
    if resolve_check_lifetimes():
        engine.check_lifetimes()
    delays = resolve_delays()
    if delays is not None:
        engine.observers.add(DelayObserver(delays, sharding.device))


def _add_gradient_checks(engine: Engine, switches: Switches, device: torch.device) -> None:
    labels = {
        name: unit.label.strip("()")  # messages put it in parentheses
        for unit in engine.units
        for group in unit.groups  # frozen ones too, which may be thawed
        for name in group.names
    }
    if switches.check_finite:
        engine.finite_check = FiniteCheck(list(labels), engine.reaching_all, device, labels)
        for group in engine.groups():
            engine.inspect_gradients(group)
    if switches.check_large:
        engine.large_check = LargeGradientCheck(list(labels), engine.reaching_all, device, labels)


def _sharding(switches: Switches, index: FSDPDistributedIndex, device: torch.device) -> Sharding:
    traffic = {name: Traffic() for name in (index.dp_outer_dim, index.dp_shard_dim) if name is not None}
    has_outer = index.dp_outer_dim is not None
    if not has_outer and switches.outer_strategy is not ShardingStrategy.no_shard:
        raise ConfigurationError(
            f'outer_dp_sharding_strategy="{switches.outer_strategy.name}" needs an outer axis; pass dp_outer_dim and '
            "hybrid_fsdp_group, or leave it out"
        )
    sums_locally = switches.reduce_scatter_with_fp32_accumulation
    placements_for(switches.strategy, switches.outer_strategy if has_outer else None)  # refuses what makes no sense
    return Sharding(
        switches.strategy,
        switches.outer_strategy if has_outer else None,
        switches.policy,
        make_domain(index, traffic, sums_locally=sums_locally),
        make_domain(index, traffic, is_expert=True, sums_locally=sums_locally)
        if index.expt_device_mesh is not None
        else None,
        device,
        switches.average_in_collective,
        switches.calculate_per_token_loss,
        switches.find_unused_parameters,
        switches.scales_first,
        switches.numel_multiple,
        switches.fp32_patterns,
    )


def _plan_together(
    module: nn.Module, grouping: Grouping, switches: Switches, sharding: Sharding
) -> tuple[UnitPlan, HangSettings | None]:
    """Check the model and find its units; every rank gets the same answer or the same error."""
    plan, hang_settings, problem, facts = None, None, None, []
    try:
        hang_settings = resolve_hang_log()
        if switches.reduce_scatter_with_fp32_accumulation:
            refuse_without_reduce_scatter(switches.strategy)
        check_module(module, switches.init_meta)
        params = dict(module.named_parameters())
        for name, param in params.items():
            part_of(name, param, sharding.domain(sharding.is_expert(name, param)).tensor_parallel)
        sharding.check_patterns([name for name, param in params.items() if param.requires_grad])
        plan = grouping.plan(module, sharding)
        facts = _facts(module, plan, switches, sharding)
        facts.append(f"{FOLDER_VARIABLE} {'set' if hang_settings else 'not set'}")
        facts.append(f"{SHARED_MEMORY_VARIABLE} {'1' if resolve_shared_memory() else '0'}")
    except (MegatronFSDPError, TypeError) as error:
        problem = error
    agree_over(sharding.reaching_all, problem, facts)
    assert plan is not None
    return plan, hang_settings


def _match_ranks(module: nn.Module, sharding: Sharding) -> None:
    differing = match_ranks(module, sharding)
    if differing:
        warn_caller(
            f"{len(differing)} parameters or buffers differed between ranks at wrap time (first: {differing[0]}); all "
            "ranks now have those of the first rank of the group; seed every rank alike before building the model",
        )
    duplicates = differing_duplicates(module, sharding)
    if duplicates:
        warn_caller(
            f"{len(duplicates)} parameters that tensor-parallel ranks hold whole differ between these ranks (first: "
            f"{duplicates[0]}); they are left as they are, and each rank trains its own; initialise them alike",
        )


def _warn_of_missing_experts(module: nn.Module, sharding: Sharding) -> None:
    if sharding.experts is not None and not any(sharding.is_expert(*named) for named in module.named_parameters()):
        warn_caller(
            "expt_device_mesh was given, and no parameter is an expert's: none has '.experts.' in its name or carries "
            "allreduce=False, so all are averaged over the dense ranks; rename or mark them, or leave the mesh out"
        )


def _warn_of_narrowing(units: Sequence[Unit]) -> None:
    narrowed = [
        group for unit in units for group in unit.groups if group.gradients is not None and group.plan.precision.narrows
    ]
    if narrowed:
        precision = narrowed[0].plan.precision
        warn_caller(
            f"{len(narrowed)} parameter groups compute in {precision.compute} and are optimised in "
            f"{precision.main_params}, which is narrower (first: {narrowed[0].names[0]}); set "
            "MixedPrecisionPolicy(main_params_dtype=None) to "
            "optimise them as they are",
        )


def _facts(module: nn.Module, plan: UnitPlan, switches: Switches, sharding: Sharding) -> list[str]:
    """What every data-parallel rank must have in common; experts may be others on other ranks."""
    chosen = [f"{name}={value}" for name, value in vars(switches).items()]
    units = [f"unit {spec.name!r} of {spec.class_name}" for spec in plan.units]
    if not all(spec.is_module for spec in plan.units):
        units.append(plan.source)  # names that were made up tell nothing of what is in them
    params = [
        f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}{_place(p)}"
        for name, p in module.named_parameters()
        if not sharding.is_expert(name, p)
    ]
    buffers = [
        f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}{_place(buffer)}"
        for name, buffer in module.named_buffers()
        if not sharding.is_expert(name, buffer)
    ]
    return [*chosen, *params, *buffers, *units]


def _place(tensor: torch.Tensor) -> str:
    return " on the meta device" if tensor.is_meta else ""


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Module buffers are not sharded; they follow the parameters to their device, and out of inference mode."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if buffer.device != device or buffer.is_inference():
                owner._buffers[name] = buffer.to(device, copy=True)
