"""Reading a description off a live engine: groups, units, axes, memory and optimizers. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.buffer.real_values import backend_of
from megatron_fsdp.description import (
    AxisDescription,
    GroupDescription,
    MemoryDescription,
    OptimizerDescription,
    UnitDescription,
)
from megatron_fsdp.placement import Placement
from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.footprint import memory_of
from megatron_fsdp.runtime.local_step import steps_locally
from megatron_fsdp.runtime.schedule import ROOT
from megatron_fsdp.unit.param_group import ParameterGroup
from megatron_fsdp.unit.tensor_parallel import local_part
from megatron_fsdp.unit.unit import Unit
from megatron_fsdp.units import UnitPlan


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
    shares_memory = axis is not None and axis.shared is not None
    return AxisDescription(name, role, size, rank, ranks, backend, has_second, shares_memory)


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
        main_bytes=0 if group.weights.shares_memory else group.weights.main.local.nbytes,
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
        shared_bytes=held.shared_bytes,
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
