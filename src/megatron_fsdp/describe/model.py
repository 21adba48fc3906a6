"""The description of a whole model: read off the live engine and its options. Nothing is communicated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.comm.agreement import rank_of, world_size_of
from megatron_fsdp.comm.collectives import backend_of
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.describe.description import (
    AxisDescription,
    Description,
    GroupDescription,
    MemoryDescription,
    OptimizerDescription,
    UnitDescription,
)
from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.engine import Engine, engine_of_model
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.optim.chained import ChainedOptimizer
from megatron_fsdp.optim.optimizer import count_kinds, step_of
from megatron_fsdp.sharding.placement import Placement, strategies_of
from megatron_fsdp.sharding.units import ROOT_UNIT


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that the engine holds on this rank's device."""

    compute_weight_bytes: int  # while they are sharded, with amaxes and scales of their formats
    main_weight_bytes: int  # of those that have memory of their own
    main_grad_bytes: int  # while there are any: from a backward until they are cleared
    transient_peak_bytes: int  # most that gathered weights have taken, and buckets and scratch as far as allocated
    gathered_bytes: int  # of gathered weights now; slots count whether or not they are in use
    # of offloaded state, by kind; not counted above
    offloaded: Mapping[str, int] = field(default_factory=dict)

    @property
    def persistent_bytes(self) -> int:
        """Bytes held between steps, without optimizer state."""
        return self.compute_weight_bytes + self.main_weight_bytes + self.main_grad_bytes


def memory_of(engine: Engine) -> MemoryUse:
    """Add up the engine's buffers."""
    groups = engine.groups()
    whole = {group: 0 if group.weights.main_lies_in_compute else group.weights.main.local.nbytes for group in groups}
    held = {
        "compute_weights": [(group.plan.offloads_compute, group.weights.compute.local.nbytes) for group in groups],
        "main_weights": [(group.plan.offloads_main, num_bytes) for group, num_bytes in whole.items()],
        "main_gradients": [
            (gradients.main.is_offloaded, gradients.main.num_bytes) for _, gradients in engine.groups_with_gradients()
        ],
    }
    offloaded = {kind: sum(count for is_offloaded, count in parts if is_offloaded) for kind, parts in held.items()}
    offloaded["optimizer_state"] = _state_bytes(engine, is_offloaded=True)
    compute, main, grads = (sum(count for is_offloaded, count in parts if not is_offloaded) for parts in held.values())
    compute += sum(group.weights.quantizer.num_bytes for group in groups if group.weights.quantizer is not None)
    return MemoryUse(
        compute,
        main,
        grads,
        engine.executor.transient_bytes,
        engine.executor.weight_memory.held_bytes,
        {kind: count for kind, count in offloaded.items() if getattr(engine.options.offload, kind)},
    )


def axes_of(engine: Engine) -> tuple[AxisDescription, ...]:
    """Describe the mesh axes of dense parameters, of experts, and the tensor-parallel one."""
    dense = engine.rank_meshes[0]
    found = [
        _axis(name, kind + role, axis.group, axis.rank, axis.num_ranks, axis.gather_group)
        for rank_mesh in engine.rank_meshes
        for kind in ("expert " if rank_mesh.is_expert else "",)
        for name, role, axis in zip(
            rank_mesh.names, ("outer", "shard")[-len(rank_mesh.axes) :], rank_mesh.axes, strict=True
        )
    ]
    mesh = dense.tensor_parallel
    if mesh is not None:
        name, place = (mesh.mesh_dim_names or ("",))[0], mesh.get_coordinate()
        found.append(_axis(name, "tensor parallel", dense.tensor_parallel_group, place[0] if place else 0, mesh.size()))
    return tuple(found)


def _axis(
    name: str,
    role: str,
    group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    gather_group: dist.ProcessGroup | None = None,
) -> AxisDescription:
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else (rank_of(),)
    backend = None if group is None else backend_of(group)
    return AxisDescription(name, role, size, rank, ranks, backend, gather_group not in (None, group))


def units_of(engine: Engine) -> tuple[UnitDescription, ...]:
    """Describe all units, root first."""
    states = _state_dtypes(engine)
    return tuple(
        UnitDescription(
            index=unit.index,
            label=unit.label,
            class_name=spec.class_name,
            numel=sum(group.plan.layout.payload_numel for group in unit.groups),
            groups=tuple(_group(group, states) for group in unit.groups),
        )
        for unit, spec in zip(engine.units, engine.unit_plan.units, strict=True)
    )


def _state_dtypes(engine: Engine) -> dict[int, tuple[str, ...]]:
    """Map the id of each parameter to the dtypes of the optimizer state of its shape."""
    found: dict[int, tuple[str, ...]] = {}
    for param, state in (item for optimizer in engine.connected for item in optimizer.state.items()):
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        if dtypes := [_name(value.dtype) for value in tensors if value.shape == param.shape]:
            found[id(param)] = tuple(dict.fromkeys(dtypes))
    return found


def _group(group: ParameterGroup, states: dict[int, tuple[str, ...]]) -> GroupDescription:
    plan, gradients = group.plan, group.gradients
    sends = any(axis.num_ranks > 1 for axis in plan.axes)
    form = plan.weight_format
    stored = form.name if form is not None and group.weights.is_encoded else _name(plan.precision.compute)
    return GroupDescription(
        parameters=len(group.names),
        numel=plan.layout.payload_numel,
        padding_numel=plan.layout.padding_numel,
        shard_numel=group.weights.main.local.numel(),
        is_trainable=group.is_trainable,
        is_expert=plan.rank_mesh.is_expert,
        tensor_parallel=sum(part is not None and part.is_cut for part in plan.parts),
        storage=stored,
        compute=_name(group.full[0].dtype),
        gather=stored if plan.needs_all_gather or plan.gathers_outer else None,
        weight_format=None if form is None else form.name,
        saved_bytes=plan.layout.numel * plan.precision.compute.itemsize - plan.sent_bytes
        if group.weights.quantizer is not None
        else None,
        reduce=_name(plan.precision.grad_comm) if sends and gradients is not None else None,
        accumulate=None if gradients is None else _name(gradients.main.dtype),
        main=_name(group.weights.main.local.dtype),
        optimizer_state=tuple(dict.fromkeys(dtype for param in group.sharded for dtype in states.get(id(param), ()))),
        compute_weight=_placed(plan.placements.compute_weight),
        main_gradient=() if gradients is None else _placed(plan.placements.main_weight),
        main_weight=_placed(plan.placements.main_weight),
        compute_bytes=group.weights.compute.local.nbytes,
        main_bytes=0 if group.weights.main_lies_in_compute else group.weights.main.local.nbytes,
        gradient_bytes=0 if gradients is None else gradients.main.num_bytes,
    )


def _placed(placements: Sequence[Placement]) -> tuple[str, ...]:
    return tuple(placement.name.capitalize() for placement in placements)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def memory_description(engine: Engine) -> MemoryDescription:
    """Describe the bytes held now, and the settings of borrowed memory."""
    held, schedule, plan = memory_of(engine), engine.scheduler.config, engine.memory_plan
    others, offload = engine.units[ROOT_UNIT + 1 :], engine.options.offload
    return MemoryDescription(
        allocator=engine.options.memory.allocator.value,
        slots=schedule.slots if schedule.shares_slots else 0,
        slot_bytes=plan.weights.slot_bytes or max((unit.block_bytes for unit in others), default=0),
        buckets=engine.executor.bucket_count,
        bucket_bytes=max((unit.bucket_bytes for unit in others), default=0),
        forward_prefetch=schedule.forward_prefetch_units,
        backward_prefetch=schedule.backward_prefetch_units,
        persistent_bytes=held.persistent_bytes,
        optimizer_bytes=_state_bytes(engine, is_offloaded=False),
        gathered_bytes=held.gathered_bytes,
        transient_peak_bytes=held.transient_peak_bytes,
        offload=tuple(f"{kind} {getattr(offload, kind)} {in_bytes(count)}" for kind, count in held.offloaded.items()),
        pool_bytes=None if plan.pool is None else plan.pool.num_bytes,
        pool=() if plan.pool is None else tuple(map(str, plan.pool.blocks)),
    )


def _state_bytes(engine: Engine, *, is_offloaded: bool) -> int:
    """Add up the connected optimizers' state that is offloaded, or that is not."""
    found = 0
    states = {param: state for each in engine.connected for param, state in each.state.items()}  # chains share theirs
    for param, state in states.items():
        group, _ = engine.group_and_index.get(id(param), (None, 0))
        if group is not None and (group.plan.offload.optimizer_state > 0) is is_offloaded:
            found += sum(local_tensor(value).nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return found


def optimizers_of(engine: Engine, module: nn.Module) -> tuple[OptimizerDescription, ...]:
    """Describe the connected optimizers, ordered by their first parameter."""
    order = {key: position for position, key in enumerate(engine.group_and_index)}
    found = []
    for optimizer in engine.connected:
        if isinstance(optimizer, ChainedOptimizer):
            continue  # its optimizers are connected, too
        own = [param for group in optimizer.param_groups for param in group["params"] if id(param) in order]
        kind, groups = type(optimizer).__name__, len(optimizer.param_groups)
        parts = count_kinds(own, module)
        first = min((order[id(param)] for param in own), default=len(order))
        found.append((first, OptimizerDescription(kind, groups, len(own), step_of(optimizer), parts)))
    return tuple(optimizer for _, optimizer in sorted(found, key=lambda entry: (entry[0], entry[1].class_name)))


def without_optimizer(engine: Engine, module: nn.Module) -> tuple[str, ...]:
    """Describe the trained parameters that no optimizer updates, if any optimizer is connected."""
    held = {id(param) for each in engine.connected for group in each.param_groups for param in group["params"]}
    trained = [param for group in engine.groups() if group.is_trainable for param in group.sharded]
    left = [param for param in trained if id(param) not in held]
    if not held or not left:
        return ()
    return (f"no connected optimizer updates {len(left)} parameters ({', '.join(count_kinds(left, module))})",)


def unused_of(engine: Engine) -> tuple[str, ...] | None:
    """List trainable parameters without a gradient since the last clearing; None before any gradient."""
    used = {
        name: counts
        for group, gradients in engine.groups_with_gradients()
        for name, counts in zip(group.names, gradients.counts, strict=True)
    }
    return tuple(name for name, is_used in used.items() if not is_used) if any(used.values()) else None


def describe(model: nn.Module) -> Description:
    """Describe a sharded model as this rank holds it now; no communication.

    `print(describe(model))` is for people, `.to_dict()` for programs (docs/debugging.md).

    Args:
        model: A wrapper, or a model sharded in place.

    Raises:
        ConfigurationError: It is not sharded.
    """
    engine = engine_of_model(model)
    plan, units = engine.unit_plan, units_of(engine)
    shardings = {id(group.plan.sharding): group.plan.sharding for group in engine.groups()}.values()
    inner, outer = zip(*(strategies_of(each.placements) for each in shardings if each is not None), strict=True)
    return Description(
        wrapper=type(model).__name__,
        model=plan.units[ROOT_UNIT].class_name or type(model).__name__,
        rank=rank_of(),
        world_size=world_size_of(),
        device=str(engine.device),
        strategy=_names(inner) or "",
        outer_strategy=_names(outer),
        axes=axes_of(engine),
        own_groups=engine.own_groups is not None,
        unit_source=plan.source,
        units=units,
        tied=plan.aliases,
        frozen_numel=sum(group.numel for unit in units for group in unit.groups if not group.is_trainable),
        unused=unused_of(engine),
        memory=memory_description(engine),
        optimizers=optimizers_of(engine, model),
        options=_options(engine),
        notes=(*engine.notes, *without_optimizer(engine, model)),
    )


def _names(strategies: Iterable[ShardingStrategy | None]) -> str | None:
    """Name the strategies of units, each once; None where there is none."""
    return ", ".join(dict.fromkeys(strategy.name for strategy in strategies if strategy is not None)) or None


_SHOWN_ELSEWHERE = ("strategy", "outer_strategy", "policy", "memory", "numel_multiple", "own_groups")
"""Fields of `EngineOptions` that other parts of a description show."""


def _options(engine: Engine) -> dict[str, str]:
    """Collect the options that are not at their defaults, by the name of the argument or field."""
    config, options = engine.config, engine.options
    values = [(field.name, getattr(config, field.name), field.default) for field in fields(config)] if config else []
    said = {name for name, _, _ in values}  # the configuration has defaults of its own
    values += [
        (field.name.removesuffix("_s"), getattr(options, field.name), field.default)
        for field in fields(options)
        if field.name not in {*said, *_SHOWN_ELSEWHERE}
    ]
    is_synced = all(unit.mode.auto_sync or unit.mode.is_last_microbatch for unit in engine.units)
    values.append(("sync_model_each_microbatch", is_synced, True))
    return {name: str(value).removeprefix("torch.") for name, value, default in values if value != default}
