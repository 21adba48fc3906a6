"""Wrapping a model: check it, find units, shard it, register the hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from megatron_fsdp.comm.agreement import all_agree, rank_of
from megatron_fsdp.comm.collectives import Traffic, broadcast, has_values
from megatron_fsdp.comm.fingerprint import differing_tensors, same_random_numbers
from megatron_fsdp.comm.groups import OwnGroups
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import (
    ALLOCATE_ONLY,
    FOLDER_VARIABLE,
    EngineOptions,
    MemoryOptions,
    resolve_hang_log,
)
from megatron_fsdp.dtensor.expert_names import TRIVIAL_NAMES
from megatron_fsdp.dtensor.shard_spec import local_tensor, part_of
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.plans import EXPERT_NAME, GroupPlan, ModelSharding, Sharding, plan_groups
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, check_keys, warn_caller
from megatron_fsdp.formats.delayed_linear import delayed_weight_gradients
from megatron_fsdp.formats.fp8_linear import encoded_parameters
from megatron_fsdp.formats.quantized import STORED_DTYPE, stored_formats, take_quantized_apart
from megatron_fsdp.formats.tensor_extensions import extension_format, find_tensor_extensions
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex, make_rank_mesh
from megatron_fsdp.sharding.placement import placements_for
from megatron_fsdp.sharding.units import UnitPlan, looked_up, parameter_owners, plan_units
from megatron_fsdp.sharding.weight_formats import WeightFormat
from megatron_fsdp.state.experts import find_expert_names
from megatron_fsdp.wrap.meta_init import check_can_initialise, draw_blueprint, has_meta, materialise
from megatron_fsdp.wrap.shard_unit import (
    DOING,
    KnownPlans,
    ModuleEvents,
    check_not_wrapped,
    finish,
    finish_in_place,
    has_tensor_classes,
    shard_in_place,
    shard_unit,
)


class Grouping(ModuleEvents, ABC):
    """The rule by which the parameters of a model are grouped into units, and the source of the engine's events."""

    @abstractmethod
    def plan(self, module: nn.Module, sharding: ModelSharding) -> UnitPlan:
        """Return the units of a model, the root first; raise if it cannot be grouped so; the model is only read."""

    def cut_numel(self, num_ranks: int) -> int | None:  # noqa: ARG002
        """Return the elements at which the root's parameters are cut into groups; None: never."""
        return None


@dataclass(frozen=True)
class UnitGrouping(Grouping):
    """Units are modules; hooks on their forwards and backwards drive the engine."""

    unit_modules: Sequence[type[nn.Module] | str] | str | None
    memory: MemoryOptions

    def plan(self, module: nn.Module, sharding: ModelSharding) -> UnitPlan:
        """Find the units; split them for fine-grained all-gathers, or merge small neighbours."""
        ranks, shards = sharding.dense.rank_mesh, sharding.dense.num_shards
        alike = sharding.experts is None and ranks.tensor_parallel is None
        return plan_units(module, self.unit_modules, self.memory, ranks.num_ranks, shards, shapes_are_alike=alike)

    def cut_numel(self, num_ranks: int) -> int | None:
        """Return the elements at which the root's parameters are cut into groups; None: never."""
        return self.memory.root_group_numel_on(num_ranks)


def assemble(
    module: nn.Module,
    grouping: Grouping,
    options: EngineOptions,
    dist_index: FSDPDistributedIndex,
    device: torch.device,
    mode: SyncMode,
    *,
    per_unit: bool = False,
) -> Engine:
    """Replace the parameters of a model by shards; raise if it, or options together, cannot be sharded. Collective.

    `per_unit`: units are neither merged nor cut, as by one call for each (`shard_in_place`).
    """
    options.check_capture()
    delays = options.delay_wgrad_compute and not per_unit
    with delayed_weight_gradients(module) if delays else nullcontext() as delayed:
        sharding = _sharding(module, options, dist_index, device)
        plan, formats = _plan_together(module, grouping, sharding, mode)
        if per_unit:
            _refuse_in_place(plan, sharding, formats)
        move_buffers(module, device)
        _match_ranks(module, sharding)
        sharding = replace(sharding, weight_formats=formats, lookups=looked_up(module))
        _warn_of_duplicates(module, sharding)
        _warn_of_missing_experts(module, sharding)
        if options.own_groups:
            sharding = _over_own_groups(sharding)
        with all_agree(DOING, sharding.ranks.reaching_all):  # memory may run out on one rank
            if per_unit:
                known = KnownPlans()
                for spec in plan.units[::-1]:  # the root last
                    modules = [module.get_submodule(path) for path in spec.modules]
                    shard_in_place(modules, sharding.dense, mode, known)
                return finish_in_place([module], options, mode)
            planned = plan_groups(module, plan, sharding, grouping.cut_numel(sharding.dense.rank_mesh.num_ranks))
            units = _shard(module, plan, planned, sharding, mode)
            experts, expert_names = sharding.experts, TRIVIAL_NAMES
            if experts is not None:
                expert_names = find_expert_names(units, experts.rank_mesh, dist_index.expt_device_mesh)
            roots, ranks = {"": module}, sharding.ranks
            return finish(
                units, plan, roots, ranks, options, events=grouping, expert_names=expert_names, delayed=delayed
            )


def _refuse_in_place(plan: UnitPlan, sharding: ModelSharding, formats: Mapping[str, WeightFormat]) -> None:
    """Raise for options that need all units of a model together."""
    options, paths = sharding.options, [path for spec in plan.units for path in spec.modules if path]
    asked: dict[str, object] = {
        "delay_wgrad_compute": options.delay_wgrad_compute,
        "param_name_patterns_for_fp32_local_accumulation": options.param_name_patterns_for_fp32_local_accumulation,
        "megatron_fsdp_enable_fine_grained_param_gather": options.memory.fine_grained,
        "suggested_communication_unit_size": options.memory.communication_unit_numel,
        "init_model_with_meta_device=True": options.init_model_with_meta_device is True,
        "offload": options.offload,
        "a weight format, or a tensor class that gathers itself,": formats,
        "expt_device_mesh": sharding.experts,
        "zero_dp_strategy_experts": options.strategy_experts is not None,
        "tensor parallelism": sharding.dense.rank_mesh.tensor_parallel,
    }

    def unit_at(name: str) -> str:
        return next((path for path in paths if name.startswith(f"{path}.")), "")

    asked |= {f"{name}, tied to {of},": True for name, of in plan.aliases if unit_at(name) != unit_at(of)}
    found = next((name for name, value in asked.items() if value), None)
    if found is not None:
        raise NotSupportedYetError(
            f"{found} cannot be used with megatron_fsdp_version=2, which shards one plain module after another; use "
            "version 1, or leave it out"
        )


def _shard(
    module: nn.Module,
    plan: UnitPlan,
    planned: Sequence[Sequence[GroupPlan]],
    sharding: ModelSharding,
    mode: SyncMode,
) -> tuple[Unit, ...]:
    """Shard a model in place, unit by unit, so that at most one unit exists twice.

    What was on the meta device and cannot be initialised is an error on every rank alike.
    """
    leaves_empty = sharding.options.init_model_with_meta_device == ALLOCATE_ONLY
    blueprint = None if leaves_empty or not any(map(has_meta, module.modules())) else draw_blueprint(module)
    originals, owners, known = dict(module.named_parameters()), parameter_owners(module), KnownPlans()
    units = []
    for index, (spec, of_unit) in enumerate(zip(plan.units, planned, strict=True)):
        modules = {path: module.get_submodule(path) for path in spec.modules}
        units.append(shard_unit(spec.name, modules, of_unit, originals, owners, mode, known, index))
        if index:  # the root is whole wherever a forward can read its weights
            units[-1].set_error_owner(plan.remedy(spec))
    if blueprint is not None:
        dense = sharding.dense.rank_mesh
        inner_first = [axis.group for axis in reversed(dense.axes)]
        ranks = [group for group in (*inner_first, dense.tensor_parallel_group) if group is not None]
        with all_agree(DOING, sharding.ranks.reaching_all), same_random_numbers(ranks, sharding.ranks.device):
            materialise(module, blueprint, units, sharding.ranks.device)
    return tuple(units)


def _sharding(
    module: nn.Module, options: EngineOptions, dist_index: FSDPDistributedIndex, device: torch.device
) -> ModelSharding:
    traffic = {name: Traffic() for name in (dist_index.dp_outer_dim, dist_index.dp_shard_dim) if name is not None}
    has_outer = dist_index.dp_outer_dim is not None
    if not has_outer and options.outer_strategy is not ShardingStrategy.no_shard:
        raise ConfigurationError(
            f'outer_dp_sharding_strategy="{options.outer_strategy.name}" needs an outer axis; pass dp_outer_dim and '
            "hybrid_fsdp_group, or leave it out"
        )
    one_by_one = options.deterministic is not None
    sums_locally = options.reduce_scatter_with_fp32_accumulation or one_by_one
    outer = options.outer_strategy if has_outer else None
    placements = [placements_for(strategy, outer) for strategy in options.strategies]
    rank_mesh = make_rank_mesh(dist_index, traffic, sums_locally=sums_locally, one_by_one=one_by_one)
    dense = Sharding(options, rank_mesh, placements[0], device, divisor=rank_mesh.num_ranks)
    if dist_index.expt_device_mesh is not None:
        of_experts = make_rank_mesh(dist_index, traffic, is_expert=True, sums_locally=sums_locally)
        return ModelSharding(dense, replace(dense, rank_mesh=of_experts, placements=placements[-1]))
    apart = {}
    if options.strategy_experts is not None:  # on the ranks of all others, as with ep_size=1
        experts = replace(dense, placements=placements[-1])
        apart = {name: experts for name, _ in module.named_parameters() if EXPERT_NAME in f".{name}"}
    return ModelSharding(dense, apart=apart)


def _over_own_groups(sharding: ModelSharding) -> ModelSharding:
    """Return the sharding on process groups of its own along each data-parallel axis; collective, by all ranks."""
    dense, experts = sharding.dense.rank_mesh, None if sharding.experts is None else sharding.experts.rank_mesh
    flat = () if dense.flat is None else (dense.flat.axis,)
    own = OwnGroups((*dense.axes, *(() if experts is None else experts.axes), *flat))
    cut = len(dense.axes)
    on_own = replace(
        dense, axes=own.axes[:cut], flat=None if dense.flat is None else replace(dense.flat, axis=own.axes[-1])
    )
    found = replace(sharding, dense=replace(sharding.dense, rank_mesh=on_own), own_groups=own)
    if sharding.experts is not None and experts is not None:
        apart = replace(experts, axes=own.axes[cut : cut + len(experts.axes)])
        found = replace(found, experts=replace(sharding.experts, rank_mesh=apart))
    return found


def _plan_together(
    module: nn.Module, grouping: Grouping, sharding: ModelSharding, mode: SyncMode
) -> tuple[UnitPlan, dict[str, WeightFormat]]:
    """Check the model, find its units and weight formats; every rank gets the same answer or the same error."""
    options = sharding.options
    with all_agree(DOING, sharding.ranks.reaching_all) as facts:
        keeps_log = resolve_hang_log() is not None
        _check_options(sharding)
        check_module(module, options.init_model_with_meta_device)
        of_classes = has_tensor_classes(module)
        if of_classes:
            take_quantized_apart([module])
        params = dict(module.named_parameters())
        for name, param in params.items():
            part_of(name, param, sharding.of(name, param).rank_mesh.tensor_parallel)
        sharding.check_patterns([name for name, param in params.items() if param.requires_grad])
        formats, keeps = dict[str, WeightFormat](), options.keep_fp8_transpose_cache
        if options.policy.weight_formats or keeps:
            formats = encoded_parameters(module, options.policy, min(options.strategies), keeps_transposed=keeps)
        extensions = find_tensor_extensions(module, sharding) if of_classes else {}
        plan = grouping.plan(module, sharding)
        facts |= _facts(module, plan, sharding)
        if any(param.dtype is STORED_DTYPE for param in params.values()):
            facts |= stored_formats(module)
        facts |= {f"the class of {name}": str(extension) for name, extension in extensions.items()}
        facts["sync_model_each_microbatch"] = str(mode.auto_sync)
        facts[FOLDER_VARIABLE] = "set" if keeps_log else "not set"
    if extensions:
        with all_agree(DOING, sharding.ranks.reaching_all):  # each encodes a row
            dense = sharding.dense.rank_mesh
            mesh = dense.described_mesh[(dense.names[-1],)]
            formats |= {name: extension_format(each, params[name], mesh) for name, each in extensions.items()}
    return plan, formats


def _check_options(sharding: ModelSharding) -> None:
    """Raise if options contradict each other, or cannot hold on these ranks."""
    options, dense = sharding.options, sharding.dense.rank_mesh
    is_tensor_parallel = dense.tensor_parallel is not None and dense.tensor_parallel.size() > 1
    shares_outer = len(dense.axes) > 1 and options.outer_strategy is not ShardingStrategy.no_shard
    if options.reduce_scatter_with_fp32_accumulation and ShardingStrategy.no_shard in options.strategies:
        raise ConfigurationError(
            "reduce_scatter_with_fp32_accumulation=True needs a reduce-scatter, but zero_dp_strategy=0 (no_shard) "
            "reduces by an all-reduce; use strategy 1, 2 or 3, or set it to False and grad_comm_dtype=torch.float32"
        )
    if options.strategy_experts is not None and sharding.experts is None and not sharding.apart:
        raise ConfigurationError(
            f"zero_dp_strategy_experts={options.strategy_experts.name} has no effect, since no parameter has "
            "'.experts.' in its name; rename the experts, pass expt_device_mesh where they are marked, or leave it out"
        )
    reason = None
    if not options.calculate_per_token_loss:
        reason = (
            "the mean divides by the number of ranks; pass calculate_per_token_loss=True and divide losses yourself"
        )
    elif is_tensor_parallel:
        reason = "tensor parallelism cuts the sums inside of matrix products; use a mesh without a tensor-parallel axis"
    elif sharding.experts is not None:
        reason = "which tokens an expert computes together depends on the ranks; leave expt_device_mesh (ep_size) out"
    if options.deterministic is not None and reason is not None:
        raise ConfigurationError(f'deterministic="{options.deterministic}" cannot hold here: {reason}')
    if shares_outer and options.offload.compute_weights:
        raise ConfigurationError(
            "offload has compute_weights, and outer ranks share out the main weights (HFSDP), whose gathers "
            "write into the shards on the device; leave compute_weights out, or use outer_dp_sharding_strategy 0"
        )


def _warn_of_missing_experts(module: nn.Module, sharding: ModelSharding) -> None:
    if sharding.experts is not None and not any(sharding.is_expert(*named) for named in module.named_parameters()):
        warn_caller(
            "expt_device_mesh was given, and no parameter is an expert's: none has '.experts.' in its name or carries "
            "allreduce=False, so all are averaged over the dense ranks; rename or mark them, or leave the mesh out",
            is_first=sharding.ranks.is_first,
        )


def _facts(module: nn.Module, plan: UnitPlan, sharding: ModelSharding) -> dict[str, str]:
    """List the facts that every data-parallel rank must have in common; experts may differ between ranks."""
    memory = {f"{name} (of memory)": value for name, value in vars(sharding.options.memory).items()}
    options = {**vars(sharding.options), **memory}
    facts = {name: str(value) for name, value in options.items() if name != "memory"}
    facts |= {
        f"parameter {name}": f"{tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}{_device_note(p)}"
        for name, p in module.named_parameters()
        if not sharding.is_expert(name, p)
    }
    facts |= {
        f"buffer {name}": f"{tuple(buffer.shape)} {buffer.dtype}{_device_note(buffer)}"
        for name, buffer in module.named_buffers()
        if not sharding.is_expert(name, buffer)
    }
    facts |= {f"unit {spec.name!r}": f"of {spec.class_name}" for spec in plan.units}
    if not all(spec.modules for spec in plan.units):
        facts["units"] = plan.source  # made-up names do not identify their parameters
    return facts


def _device_note(tensor: torch.Tensor) -> str:
    return " on the meta device" if tensor.is_meta else ""


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move module buffers, which are not sharded, to the parameters' device, and out of inference mode."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if buffer.device != device or buffer.is_inference():
                owner._buffers[name] = buffer.to(device, copy=True)


def check_module(module: nn.Module, init_meta: bool | str) -> None:
    """Raise for a model without parameters, or whose parameters cannot be sharded as they are; no communication."""
    check_not_wrapped(module)
    params = dict(module.named_parameters())
    if not params:
        raise ConfigurationError(f"{type(module).__name__} has no parameters; there is nothing to shard")
    check_keys(name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    sharded = [name for name, p in params.items() if hasattr(p, "_megatron_fsdp_model") or isinstance(p, UnevenDTensor)]
    if sharded:
        raise ConfigurationError(
            f"the model is sharded already ({len(sharded)} of {len(params)} parameters, such as {sharded[0]}); wrap a "
            "model once"
        )
    lazy = [name for name, param in params.items() if isinstance(param, UninitializedParameter)]
    if lazy:
        raise ConfigurationError(
            f"{len(lazy)} parameters are not initialised yet (such as {lazy[0]}); run one forward before sharding, so "
            "that lazy modules know their shapes"
        )
    _check_meta(module, params, init_meta)
    first_on = {str(param.device): name for name, param in reversed(params.items()) if not param.is_meta}
    if len(first_on) > 1:
        examples = ", ".join(f"{name} on {device}" for device, name in sorted(first_on.items()))
        raise ConfigurationError(
            f"parameters lie on {len(first_on)} devices ({examples}); move the model to one device first"
        )


def _check_meta(module: nn.Module, params: Mapping[str, nn.Parameter], init_meta: bool | str) -> None:
    if init_meta not in (True, False, ALLOCATE_ONLY):
        raise ConfigurationError(
            f"init_model_with_meta_device={init_meta!r}; give True, False, or {ALLOCATE_ONLY!r} for shards that are "
            "filled afterwards"
        )
    if init_meta:
        if init_meta != ALLOCATE_ONLY:
            check_can_initialise(module)
        return
    for kind, tensors in (("parameters", params), ("buffers", dict(module.named_buffers()))):
        meta = [name for name, tensor in tensors.items() if tensor.is_meta]
        if meta:
            raise ConfigurationError(
                f"{len(meta)} of {len(tensors)} {kind} are on the meta device (such as {meta[0]}) and "
                "init_model_with_meta_device is False; set it to let modules initialise themselves, or materialise "
                "the model first"
            )


def _match_ranks(module: nn.Module, sharding: ModelSharding) -> None:
    """Broadcast the first rank's weights if data-parallel ranks differ, and warn of it.

    Ranks that were seeded differently would otherwise each contribute their own shard to a model that nobody
    initialised. A hash of each tensor is compared first, so that nothing but the hashes is sent where ranks agree.
    Tensor-parallel ranks hold different parts, and experts differ between expert-parallel ranks; these are left alone.
    """
    held: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    experts = {name: tensor for name, tensor in held.items() if sharding.is_expert(name, tensor)}
    dense = {name: tensor for name, tensor in held.items() if name not in experts}
    differing: set[str] = set()
    for tensors, own in ((dense, sharding.dense), (experts, sharding.experts)):
        # Over the inner ranks first: then all ranks of an inner group equal its first one.
        for axis in reversed(own.rank_mesh.axes if own is not None else ()):
            if axis.group is not None:
                differing.update(_match(_plain(tensors), axis.group, sharding.ranks.device))
    if differing:
        first = next(name for name in held if name in differing)
        warn_caller(
            f"{len(differing)} parameters or buffers differed between ranks at wrap time (first: {first}); all ranks "
            "now have those of the first rank of the group; seed every rank alike before building the model",
            is_first=rank_of(sharding.dense.rank_mesh.axes[-1].group) == 0,  # the ranks along the others may be alike
        )


def _warn_of_duplicates(module: nn.Module, sharding: ModelSharding) -> None:
    """Warn of parameters that tensor-parallel ranks hold whole, but with different values."""
    group, mesh = sharding.dense.rank_mesh.tensor_parallel_group, sharding.dense.rank_mesh.tensor_parallel
    if group is None:
        return
    whole = {
        name: param
        for name, param in module.named_parameters()
        if (part := part_of(name, param, mesh)) is not None and not part.is_cut and not sharding.is_expert(name, param)
    }
    duplicates = differing_tensors(_plain(whole), group, sharding.ranks.device)
    if duplicates:
        warn_caller(
            f"{len(duplicates)} parameters that tensor-parallel ranks hold whole differ between these ranks (first: "
            f"{duplicates[0]}); they are left as they are, and each rank trains its own; initialise them alike",
            is_first=rank_of(group) == 0,
        )


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    local = {name: local_tensor(tensor.detach()) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in local.items() if tensor.numel() and has_values(tensor)}


def _match(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> tuple[str, ...]:
    differing = differing_tensors(tensors, group, device)
    for name in differing:
        value = tensors[name].to(device).contiguous()
        broadcast(value, group)
        with torch.inference_mode(tensors[name].is_inference()):  # the only place where such a tensor may be written
            tensors[name].copy_(value)
    return differing
