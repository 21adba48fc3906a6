"""The gather of a bucket of a pass: cast before it is sent; from compute weights where these are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import rank_of
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.memory import on_device, shard_view
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.weight_quantizer import WrappingQuantizer
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import Region
from megatron_fsdp.state.gathers import Entry, Place, gather
from megatron_fsdp.weights.plan import Plan, Source

Memory = tuple[torch.Tensor, Region]
"""Weights of a group on this rank, flat, and where they lie in the full buffer."""


def gather_bucket(bucket: Sequence[Source], plan: Plan, values: str) -> dict[str, torch.Tensor] | None:
    """Gather the model tensors of a bucket by name, copies; None on ranks that do not get them. Collective."""
    found: dict[str, torch.Tensor] = {}
    receiver = bucket[0].receiver
    every = [each for source in bucket for each in (source, *source.factors)]
    for _, run in groupby(sorted(enumerate(every), key=_first_of_kind(every)), key=lambda each: each[1].kind):
        alike = [source for _, source in run]
        made = _gather(alike, plan, values)
        for source, tensors in zip(alike, made or (), strict=made is not None):
            found.update(zip(source.names, tensors, strict=True))
    if receiver not in (None, rank_of()):
        return None
    for source in bucket:
        for merge, factors in source.merges:
            full = {attribute: found[factor.names[0]] for attribute, factor in factors.items()}
            merge.add_to(found[source.names[0]], full)
    return found


def _gather(sources: Sequence[Source], plan: Plan, values: str) -> list[list[torch.Tensor]] | None:
    """Gather sources of one kind."""
    first = sources[0]
    if first.place is None:
        return [[whole(first.tensor, first.dtype)]]
    engine, group, _ = first.place
    memory, region = _weights_of(engine, group, first.dtype, values)
    entries = [
        Entry(group, index, shard_view(group.plan.layout, region, memory, index), source.parts, 0)
        for source in sources
        if source.place is not None
        for _, _, index in [source.place]
    ]
    place: Place = ()
    receiver: Place | None = None
    if first.receiver is not None:
        place, receiver = plan.places[rank_of()][first.mesh_key], plan.places[first.receiver][first.mesh_key]
    # A little more than the tensors, so that a group of which nothing but padding is missing is one all-gather.
    limit = sum(entry.numel for entry in entries) * first.dtype.itemsize * 5 // 4 + 2**12
    return gather(entries, first.dtype, limit, place, receiver, is_gathered=region.numel == group.plan.layout.numel)


def _first_of_kind(bucket: Sequence[Source]) -> Callable[[tuple[int, Source]], tuple[int, int]]:
    """Return the key that brings sources of one kind together, in the order in which kinds come first."""
    first: dict[object, int] = {}
    for at, source in enumerate(bucket):
        first.setdefault(source.kind, at)
    return lambda each: (first[each[1].kind], each[0])


def _weights_of(engine: Engine, group: ParameterGroup, dtype: torch.dtype, values: str) -> Memory:
    """Return the weights to gather: as a forward would gather them, where it computes in this dtype."""
    weights, plan = group.weights, group.plan
    if weights.quantizer is None and plan.precision.compute == dtype:
        if plan.shards_compute_weights:
            return weights.compute.view_of(plan.main_region), plan.main_region
        if plan.needs_all_gather or plan.gathers_outer:
            # In place, so that the next forward has it already.
            unit = next(unit.index for unit in engine.units if any(each is group for each in unit.groups))
            engine.executor.all_gather_outer()
            engine.executor.wait_for_outer()
            engine.executor.run(engine.scheduler.weights_requested(unit))
        return weights.compute.local, Region(0, plan.layout.numel)
    return local_weights(group, values)


def local_weights(group: ParameterGroup, values: str) -> Memory:
    """Return this rank's main weights, rounded by the weight format if values are to be as computed."""
    weights, plan = group.weights, group.plan
    main = weights.main.local.detach()
    if weights.quantizer is not None and values == "computed":
        if isinstance(weights.quantizer, WrappingQuantizer):
            raise ConfigurationError(
                f'values="computed" of {group.names[0]}: modules compute with encoded weights; give values="main"'
            )
        rounded = torch.empty(plan.main_region.numel, dtype=plan.precision.compute, device=plan.device)
        weights.quantizer.round_into(on_device(main, plan.device), plan.main_region, rounded)
        return rounded, plan.main_region
    return main, plan.main_region


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor that no engine of ours has sharded; its shards are cast before they are gathered."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype, copy=True)
    local = tensor._local_tensor.to(dtype, copy=True)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
