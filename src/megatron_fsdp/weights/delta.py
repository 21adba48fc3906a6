"""This rank's ranges of the tensors on the wire, and their elements that have changed since they were last sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron_fsdp.checkpoint.folder import whole_box
from megatron_fsdp.comm.agreement import Groups, is_first_in
from megatron_fsdp.dtensor.shard_spec import cut_up, gather_padded
from megatron_fsdp.engine.memory import shard_view
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.sharding.shards import Box
from megatron_fsdp.weights.gathering import local_weights
from megatron_fsdp.weights.plan import ParamMeta, Plan, Source

MAX_NUMEL = 2**31
"""Elements of a tensor beyond which indices do not fit into int32, so that it comes whole."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Shard:
    """This rank's range [offset, offset + numel) of a flattened tensor on the wire."""

    name: str
    tensor: torch.Tensor  # (numel,)
    full_shape: tuple[int, ...]
    offset: int
    group: dist.ProcessGroup | None  # of the ranks that share it; None: all of the model
    contributes: bool  # False where another rank sends the same

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.tensor.numel()


@dataclass(frozen=True)
class Patch:
    """The changed elements of a tensor, at int32 indices of the flattened one; without indices the whole tensor."""

    name: str
    indices: torch.Tensor | None
    values: torch.Tensor
    full_shape: tuple[int, ...]


def local_shards(plan: Plan, values: str, ranks: Groups) -> Iterator[Shard]:
    """Iterate over this rank's ranges of all tensors on the wire, in their dtype; no communication."""
    for source in (source for bucket in plan.buckets for source in bucket):
        if source.merges:
            raise ConfigurationError(
                f"{source.names[0]} is merged with an adapter, so that no rank has a part of it; send whole tensors, "
                'or adapters="only"'
            )
        boxes, contributes = _boxes_of(source, values, ranks)
        own, group = source.names[0], None
        if source.place is not None:
            group = source.place[1].plan.rank_mesh.group
        if len(source.names) > 1 and source.parts is not None:
            own = source.names[dist.get_rank(source.parts.group)]
        for wire, part in plan.feeds.get(own, ()):
            for box, held in boxes:
                met = part.source.meet(box)
                if met is None:
                    continue
                flat = held[met.inside(box).indices].to(source.dtype).to(wire.meta.dtype).reshape(-1)
                starts, length = _runs(part.to_target(met), wire.meta.shape)
                for start, each in zip(starts, flat.split(length), strict=True):
                    yield Shard(wire.meta.name, each, wire.meta.shape, start, group, contributes)


def _boxes_of(source: Source, values: str, ranks: Groups) -> tuple[list[tuple[Box, torch.Tensor]], bool]:
    """Return this rank's elements of a tensor as boxes of it, and True if no other rank gives the same ones."""
    tensor = source.tensor.detach()
    if source.place is not None:
        engine, group, index = source.place
        memory, region = local_weights(group, values)
        saved: Any = engine.expert_names.as_saved(group.names[index], tensor)
        described = saved.shard_spec.description
        here = cut_up(shard_view(group.plan.layout, region, memory, index).reshape(-1), described.boxes())
        at_start = all(dim in described.spread_dims or not at for dim, at in enumerate(described.coordinate))
        return [(box, each) for each, box in here if box.numel], described.is_saved_here and at_start
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        at = mesh.get_coordinate() or ()
        is_alone = all(not place.is_replicate() or not here for place, here in zip(placements, at, strict=True))
        local = tensor._local_tensor
        return ([(Box(tuple(offsets), tuple(shape)), local.view(shape))] if local.numel() else []), is_alone
    return ([(whole_box(tensor.shape), tensor)] if tensor.numel() else []), is_first_in(ranks)


def _runs(box: Box, shape: Sequence[int]) -> tuple[list[int], int]:
    """Return where the runs of a box begin in the flattened tensor, and the length of each."""
    cut = next((dim for dim in reversed(range(len(shape))) if box.lengths[dim] != shape[dim]), 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    steps = [[at * stride for at in range(n)] for n, stride in zip(box.lengths[:cut], strides[:cut], strict=True)]
    return [first + sum(step) for step in itertools.product(*steps)], math.prod(box.lengths[cut:])


_Key = tuple[str, int]
"""A shard's name and offset."""


@dataclass
class Changes:
    """This rank's elements that differ from the snapshot."""

    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)  # indices, values by name

    def count(self, name: str) -> int:
        """Return the number of elements of a tensor that have changed here."""
        return sum(indices.numel() for indices, _ in self.found.get(name, ()))

    def of(self, meta: ParamMeta, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int32 indices and values of a tensor's changed elements here."""
        mine = self.found.get(meta.name, [])
        indices = torch.cat([each for each, _ in mine]) if mine else torch.empty(0, dtype=torch.int64, device=device)
        values = torch.cat([each for _, each in mine]) if mine else torch.empty(0, dtype=meta.dtype, device=device)
        return indices.to(torch.int32), values


class Snapshot:
    """The values that were sent last, bit by bit, of the ranges that this rank contributes."""

    def __init__(self, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.version: int | None = None  # of what was committed
        self._held: dict[_Key, torch.Tensor] = {}
        self._next: dict[_Key, tuple[torch.Tensor | None, torch.Tensor]] = {}  # indices (None: all) and values
        self._next_version: int | None = None
        self._is_complete = False

    def take(self, version: int, shards: Iterator[Shard]) -> None:
        """Copy all ranges, to be committed once they were sent."""
        copied = {(shard.name, shard.offset): (None, self._kept(shard.tensor)) for shard in shards if shard.contributes}
        self._next, self._next_version, self._is_complete = dict(copied), version, False

    def changes(self, version: int, shards: Iterator[Shard]) -> Changes:
        """Compare all ranges with the committed ones; the differences are to be committed once they were sent."""
        found = Changes()
        self._next, self._next_version, self._is_complete = {}, version, False
        for shard in shards:
            if not shard.contributes:
                continue
            key, bits = (shard.name, shard.offset), _BITS[shard.tensor.dtype.itemsize]
            old = self._held[key].to(shard.tensor.device)
            at = (shard.tensor.view(bits) != old.view(bits)).nonzero().flatten()
            if at.numel():
                values = shard.tensor[at]
                found.found.setdefault(shard.name, []).append((at + shard.offset, values))
                self._next[key] = self._kept(at), self._kept(values)
        return found

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", copy=True) if self._on_cpu else tensor.clone()

    def finish(self) -> None:
        """Mark the ranges taken last as sent."""
        self._is_complete = True

    def commit(self) -> None:
        """Take over the values sent last."""
        if not self._is_complete:
            raise ScheduleError("no pass was completed since the last commit(); iterate over all of it first")
        for key, (indices, values) in self._next.items():
            if indices is None:
                self._held[key] = values
            else:
                self._held[key][indices] = values
        self.version, self._next, self._is_complete = self._next_version, {}, False


# ---- between ranks ---------------------------------------------------------------------------------------------------


def _several(groups: Groups) -> list[dist.ProcessGroup]:
    return [group for group in groups if group is not None and dist.get_world_size(group) > 1]


def sum_counts(counts: Sequence[int], groups: Groups, device: torch.device) -> list[int]:
    """Add integers up over all ranks."""
    total = torch.tensor(counts, dtype=torch.int64, device=device)
    for group in _several(groups):
        dist.all_reduce(total, group=group)
    return [int(each) for each in total.tolist()]


def gather_changes(
    metas: Sequence[ParamMeta], changes: Changes, groups: Groups, device: torch.device
) -> Iterator[Patch]:
    """Gather the changed elements of some tensors from all ranks; three collectives for each group and dtype."""
    for _, run in groupby(metas, key=lambda meta: meta.dtype):
        alike = list(run)
        held = [changes.of(meta, device) for meta in alike]
        for group in _several(groups):
            held = _gather_over(held, group)
        for meta, (indices, values) in zip(alike, held, strict=True):
            order = indices.argsort()
            yield Patch(meta.name, indices[order], values[order], meta.shape)


_Held = list[tuple[torch.Tensor, torch.Tensor]]


def _gather_over(held: _Held, group: dist.ProcessGroup) -> _Held:
    counts = torch.tensor([indices.numel() for indices, _ in held], dtype=torch.int64, device=held[0][0].device)
    by_rank = gather_padded(counts, len(held), [group]).tolist()

    def gathered(own: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Gather the tensors of all ranks, padded to the longest; by rank."""
        rows = gather_padded(torch.cat(list(own)), max(map(sum, by_rank)), [group])  # one row if all are empty
        return [row[: sum(of_rank)].split(of_rank) for row, of_rank in zip(rows, by_rank, strict=False)]

    indices, values = gathered([each for each, _ in held]), gathered([each for _, each in held])
    return [
        (torch.cat([row[at] for row in indices]), torch.cat([row[at] for row in values])) for at in range(len(held))
    ]
