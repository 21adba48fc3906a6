"""Putting a description of a whole model together: live engine, options and their effects. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.comm.axis import Axis, backend_of
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.describe.description import (
    AxisDescription,
    Description,
    GroupDescription,
    MemoryDescription,
    OptimizerDescription,
    OptionDescription,
    UnitDescription,
)
from megatron_fsdp.describe.options import BUCKETS, EFFECTS, ENGINE_FIELDS, FULLY_SHARD, Option, OptionFacts
from megatron_fsdp.engine.domains import Domain
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.gradients import GRAD
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.schedule import ROOT
from megatron_fsdp.engine.tensor_parallel import local_part
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.engine.wrap import Assembly, Switches
from megatron_fsdp.optim.local_step import steps_locally
from megatron_fsdp.sharding.accounting import GroupFootprint
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex
from megatron_fsdp.sharding.placement import Placement
from megatron_fsdp.sharding.units import UnitPlan

# What a wrapped model holds and costs, read off the live objects.


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that the engine holds on this rank.

    Attributes:
        compute_weight_bytes: Compute weights at rest.
        main_weight_bytes: Main weights that are memory of their own.
        main_grad_bytes: Main gradients while there are any: from a backward until they are cleared.
        transient_peak_bytes: The most that gathered weights have taken, and communication buckets and scratch as far
            as taken.
        gathered_bytes: What gathered weights take now; slots count whether or not they are in use.
    """

    compute_weight_bytes: int
    main_weight_bytes: int
    main_grad_bytes: int
    transient_peak_bytes: int
    gathered_bytes: int

    @property
    def persistent_bytes(self) -> int:
        """Bytes held between steps, without optimizer state."""
        return self.compute_weight_bytes + self.main_weight_bytes + self.main_grad_bytes


def memory_of(engine: Engine) -> MemoryUse:
    """Add up the engine's buffers."""
    groups = engine.groups()
    return MemoryUse(
        sum(group.weights.compute.local.nbytes for group in groups),
        sum(group.weights.main.local.nbytes for group in groups if not group.weights.main_is_compute),
        sum(group.gradients.main.num_bytes for group in groups if group.gradients is not None),
        engine.executor.transient_bytes,
        engine.executor.weight_memory.held_bytes,
    )


def footprints_of(engine: Engine) -> tuple[GroupFootprint, ...]:
    """What the formulas of `megatron_fsdp.sharding.accounting` take, one entry per parameter group."""
    return tuple(group.plan.footprint(unit.index) for unit in engine.units for group in unit.groups)


# Reading a description off a live engine: groups, units, axes, memory and optimizers. Nothing is sent.


def axes_of(engine: Engine) -> tuple[AxisDescription, ...]:
    """The mesh axes of dense parameters, of experts, and the tensor-parallel one."""
    found = list(_axes_of_domain(engine.dense, ""))
    if engine.experts is not None:
        found += _axes_of_domain(engine.experts, "expert ")
    mesh = engine.dense.tensor_parallel
    if mesh is not None:
        name = (mesh.mesh_dim_names or ("",))[0]
        group = engine.dense.tensor_parallel_group
        place = mesh.get_coordinate()
        found.append(_axis(name, "tensor parallel", group, place[0] if place else 0, mesh.size()))
    return tuple(found)


def _axes_of_domain(domain: Domain, kind: str) -> list[AxisDescription]:
    roles = ("outer", "shard")[-len(domain.axes) :]
    return [
        _axis(name, kind + role, axis.group, axis.rank, axis.num_ranks, axis)
        for name, role, axis in zip(domain.names, roles, domain.axes, strict=True)
    ]


def _axis(
    name: str, role: str, group: dist.ProcessGroup | None, rank: int, size: int, axis: Axis | None = None
) -> AxisDescription:
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else (_rank(),)
    backend = None if group is None else backend_of(group)
    has_second = axis is not None and axis.gather_group is not None and axis.gather_group is not axis.group
    return AxisDescription(name, role, size, rank, ranks, backend, has_second)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def units_of(engine: Engine, plan: UnitPlan) -> tuple[UnitDescription, ...]:
    """All units, root first."""
    states = _state_dtypes(engine)
    return tuple(
        UnitDescription(
            index=unit.index,
            label=unit.label,
            class_name=spec.class_name,
            numel=sum(group.plan.layout.payload_numel for group in unit.groups),
            groups=tuple(_group(group, states) for group in unit.groups),
        )
        for unit, spec in zip(engine.units, plan.units, strict=True)
    )


def _state_dtypes(engine: Engine) -> dict[int, tuple[str, ...]]:
    """Dtypes of the tensors that optimizers keep for each parameter and that have its shape, by the parameter's id."""
    found: dict[int, tuple[str, ...]] = {}
    for optimizer in engine.connected:
        for param, state in optimizer.state.items():
            shaped = [
                value for value in state.values() if isinstance(value, torch.Tensor) and value.shape == param.shape
            ]
            if shaped:
                found[id(param)] = tuple(dict.fromkeys(_name(value.dtype) for value in shaped))
    return found


def _group(group: ParameterGroup, states: dict[int, tuple[str, ...]]) -> GroupDescription:
    plan, gradients = group.plan, group.gradients
    sends = any(axis.num_ranks > 1 for axis in plan.axes)
    granularities = (info.granularity for info in plan.spec.parameters)
    return GroupDescription(
        parameters=len(group.names),
        numel=plan.layout.payload_numel,
        padding_numel=plan.layout.padding_numel,
        shard_numel=group.weights.main.local.numel(),
        granularity=tuple(dict.fromkeys(each.kind.value for each in granularities)),
        is_trainable=group.is_trained,
        is_expert=plan.spec.key.is_expert,
        tensor_parallel=sum(part is not None and part.is_cut for part in plan.parts),
        storage=_name(group.weights.compute.local.dtype),
        compute=_name(group.full[0].dtype),
        gather=_name(group.weights.compute.local.dtype) if group.is_gathered or group.plan.gathers_across else None,
        reduce=_name(plan.precision.grad_comm) if sends and gradients is not None else None,
        accumulate=None if gradients is None else _name(gradients.main.dtype),
        main=_name(group.weights.main.local.dtype),
        optimizer_state=tuple(dict.fromkeys(dtype for param in group.sharded for dtype in states.get(id(param), ()))),
        compute_weight=_placed(plan.placements.compute_weight),
        main_gradient=() if gradients is None else _placed(plan.placements.main_grad),
        main_weight=_placed(plan.placements.main_weight),
        compute_bytes=group.weights.compute.local.nbytes,
        main_bytes=0 if group.weights.main_is_compute else group.weights.main.local.nbytes,
        gradient_bytes=0 if gradients is None else gradients.main.num_bytes,
    )


def _placed(placements: Sequence[Placement]) -> tuple[str, ...]:
    return tuple(placement.name.capitalize() for placement in placements)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def memory_description(engine: Engine) -> MemoryDescription:
    """Bytes held now, and how memory is borrowed."""
    held, schedule, weights = memory_of(engine), engine.scheduler.config, engine.memory.weights
    others = engine.units[ROOT + 1 :]
    return MemoryDescription(
        allocator=engine.memory.allocator.value,
        slots=schedule.slots if schedule.shares_slots else 0,
        slot_bytes=weights.slot_bytes or max((unit.gathered_bytes for unit in others), default=0),
        buckets=engine.executor.bucket_count,
        bucket_bytes=max((unit.bucket_bytes for unit in others), default=0),
        forward_prefetch=schedule.prefetch_forward,
        backward_prefetch=schedule.prefetch_backward,
        persistent_bytes=held.persistent_bytes,
        optimizer_bytes=sum(_state_bytes(engine, optimizer) for optimizer in engine.connected),
        gathered_bytes=held.gathered_bytes,
        transient_peak_bytes=held.transient_peak_bytes,
    )


def _state_bytes(engine: Engine, optimizer: torch.optim.Optimizer) -> int:
    own = (state for param, state in optimizer.state.items() if id(param) in engine.places)
    tensors = (value for state in own for value in state.values())
    return sum(local_part(value).nbytes for value in tensors if isinstance(value, torch.Tensor))


def optimizers_of(engine: Engine) -> tuple[OptimizerDescription, ...]:
    """The connected optimizers, in the order of the first parameter of each."""
    order = {key: position for position, key in enumerate(engine.places)}
    found = []
    for optimizer in engine.connected:
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        own = [order[key] for key in params if key in order]
        found.append(
            (
                min(own, default=len(order)),
                OptimizerDescription(
                    type(optimizer).__name__, len(optimizer.param_groups), len(own), steps_locally(optimizer)
                ),
            )
        )
    return tuple(told for _, told in sorted(found, key=lambda entry: (entry[0], entry[1].class_name)))


def unused_of(engine: Engine) -> tuple[str, ...] | None:
    """Trainable parameters without a gradient since gradients were last cleared; None where none has one."""
    used = {
        name: live
        for group in engine.groups()
        if group.gradients is not None
        for name, live in zip(group.names, group.gradients.holds_gradient, strict=True)
    }
    return tuple(name for name, live in used.items() if not live) if any(used.values()) else None


def root_groups_are_cut(units: Sequence[Unit]) -> bool:
    """Whether parameters of one kind lie in several groups of the root."""
    keys = [group.plan.spec.key for group in units[ROOT].groups]
    return len(set(keys)) < len(keys)


_DDP_NAMES = {"dp_shard_dim": "dp_dim"}


@dataclass(frozen=True)
class Subject:
    """What is described.

    Attributes:
        wrapper: Class of the wrapper.
        module: The model inside.
        assembly: Engine and units.
        switches: What was chosen for the model.
        index: Mesh and process groups.
        config: The configuration whose fields are told.
        policy: Dtypes, as they are now.
        auto_sync: Whether every backward ends with a sync.
        bucket_numel: Where parameters are cut by size; None: never.
        unit_modules: What was given as units.
        gathers_at_once: Whether a parameter sync only starts gathers.
        is_ddp: Whether the wrapper takes the configuration from its caller.
        gather_mode: When changed weights are gathered into buckets; None for units.
        notices: What was adjusted or derived.
    """

    wrapper: str
    module: nn.Module
    assembly: Assembly
    switches: Switches
    index: FSDPDistributedIndex
    config: DistributedDataParallelConfig
    policy: MixedPrecisionPolicy
    auto_sync: bool
    bucket_numel: int | None
    unit_modules: Sequence[type[nn.Module] | str] | str | None
    gathers_at_once: bool
    is_ddp: bool = False
    gather_mode: str | None = None
    notices: tuple[str, ...] = ()


def describe_model(subject: Subject) -> Description:
    """Describe a wrapped model as this rank holds it now."""
    engine, plan, switches = subject.assembly.engine, subject.assembly.plan, subject.switches
    units = units_of(engine, plan)
    ready = dist.is_initialized()
    return Description(
        wrapper=subject.wrapper,
        model=type(subject.module).__name__,
        rank=dist.get_rank() if ready else 0,
        world_size=dist.get_world_size() if ready else 1,
        device=str(subject.assembly.device),
        strategy=switches.strategy.name,
        outer_strategy=switches.outer_strategy.name if subject.index.dp_outer_dim is not None else None,
        axes=axes_of(engine),
        own_groups=engine.own_groups is not None,
        unit_source=plan.source,
        units=units,
        tied=plan.aliases,
        frozen_numel=sum(group.numel for unit in units for group in unit.groups if not group.is_trainable),
        unused=unused_of(engine),
        memory=memory_description(engine),
        optimizers=optimizers_of(engine),
        options=_options(subject, _facts(subject)),
        notices=subject.notices,
    )


def _options(subject: Subject, facts: OptionFacts) -> tuple[OptionDescription, ...]:
    config = subject.config
    table = BUCKETS if subject.is_ddp else FULLY_SHARD
    told = [_option(option, facts) for option in table]
    names = [field.name for field in fields(config)] if subject.is_ddp else ENGINE_FIELDS
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        value, effect = getattr(config, name), EFFECTS[name](facts)
        is_default = value == defaults[name]
        told.append(OptionDescription(name, _text(value), is_default, effect.is_there, effect.told))
    if subject.is_ddp:
        told = [replace(option, name=_DDP_NAMES.get(option.name, option.name)) for option in told]
    return tuple(told)


def _option(option: Option, facts: OptionFacts) -> OptionDescription:
    value, effect = option.read(facts), option.judge(facts)
    is_default = value == option.default_in(facts)
    return OptionDescription(option.name, _text(value), is_default, effect.is_there, effect.told)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).removeprefix("torch.")


def _facts(subject: Subject) -> OptionFacts:
    return OptionFacts(**_facts_of_ranks(subject), **_facts_of_schedule(subject))


def _facts_of_ranks(subject: Subject) -> dict[str, Any]:
    """Who shares the model, how it is cut and in which dtypes."""
    engine, index, switches = subject.assembly.engine, subject.index, subject.switches
    groups, dense, experts, given = engine.groups(), engine.dense, engine.experts, subject.unit_modules
    trainable = [group for group in groups if group.gradients is not None]
    outer = dense.axes[0].num_ranks if index.dp_outer_dim is not None else 0
    return {
        "num_ranks": dense.num_ranks,
        "outer_ranks": outer,
        "mesh_dims": tuple(index.device_mesh.mesh_dim_names or ()),
        "shard_dim": str(index.dp_shard_dim),
        "outer_dim": index.dp_outer_dim,
        "tp_dim": index.tp_dim,
        "tensor_parallel": sum(part is not None and part.is_cut for group in groups for part in group.plan.parts),
        "has_gather_group": _has_second(dense.axes[-1]),
        "has_expert_gather_group": experts is not None and _has_second(experts.axes[-1]),
        "has_expert_mesh": experts is not None,
        "experts": sum(len(group.names) for group in groups if group.plan.spec.key.is_expert),
        "device": str(subject.assembly.device),
        "strategy": int(switches.strategy),
        "outer_strategy": int(switches.outer_strategy),
        "unit_modules": "auto" if given is None or isinstance(given, str) else ", ".join(map(_class_name, given)),
        "unit_source": subject.assembly.plan.source,
        "units": len(engine.units) - 1,
        "uses_buckets": subject.gather_mode is not None,
        "init_meta": switches.init_meta,
        "policy": subject.policy,
        "narrow": any(
            min(group.plan.precision.grad_comm.itemsize, group.plan.precision.main_grads.itemsize) < 4
            for group in trainable
        ),
        "has_main_copy": any(not group.weights.main_is_compute for group in groups),
    }


def _facts_of_schedule(subject: Subject) -> dict[str, Any]:
    """What is done when, in which memory, and what is checked."""
    engine, switches = subject.assembly.engine, subject.switches
    groups, schedule = engine.groups(), engine.scheduler.config
    cut = len(engine.units) > 2 if subject.gather_mode is not None else root_groups_are_cut(engine.units)
    return {
        "overlap_grad_reduce": switches.overlap_grad_reduce,
        "overlap_param_gather": switches.overlap_param_gather,
        "reduces_early": schedule.reduces_early,
        "gathers": schedule.gathers,
        "sharded_weights": schedule.shares_slots,
        "auto_sync": subject.auto_sync,
        "describes_state": any(
            handle.id in (handle.hooks_dict_ref() or {}) for handle in subject.assembly.state_dict_handles
        ),
        "checks_finite": engine.finite_check is not None,
        "checks_large": engine.large_check is not None,
        "averages": switches.average_in_collective,
        "exchanges": any(group.exchanges_inside for group in groups),
        "sums_locally": engine.dense.axes[-1].sums_locally,
        "bucket_numel": subject.bucket_numel,
        "cut_groups": cut,
        "per_token": switches.calculate_per_token_loss,
        "decouples": any(group.grad_attribute != GRAD for group in groups),
        "allocator": engine.memory.allocator,
        "idle": switches.memory.idle,
        "slots": schedule.slots,
        "may_grow": engine.memory.may_grow,
        "forward_depth": schedule.prefetch_forward,
        "backward_depth": schedule.prefetch_backward,
        "buckets": engine.executor.bucket_count,
        "communication_numel": switches.memory.communication_unit_numel,
        "fine_grained": switches.memory.fine_grained,
        "verify_ranks_s": switches.verify_ranks_s,
        "asks_usage": switches.find_unused_parameters,
        "scales_first": switches.scales_first,
        "fp32_patterns": switches.fp32_patterns,
        "gathers_at_once": subject.gathers_at_once,
        "gather_mode": subject.gather_mode,
        "numel_multiple": switches.numel_multiple,
        "delays_weights": engine.delayed is not None,
        "fuses": switches.fuses_weight_gradients,
        "fused_linears": subject.assembly.fused_linears,
    }


def _has_second(axis: object) -> bool:
    second = getattr(axis, "gather_group", None)
    return second is not None and second is not getattr(axis, "group", None)


def _class_name(entry: type[nn.Module] | str) -> str:
    return entry if isinstance(entry, str) else entry.__name__
