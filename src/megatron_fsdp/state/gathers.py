"""Gathers of a parameter group's tensors into one buffer, a bucket at a time, to every rank or to one.

A group whose flat buffer fits into a bucket is one all-gather. A larger one is cut between tensors, and each bucket is
filled by one broadcast from every rank that owns a part of it: a rank's part of a range is a slice of the bucket, so
every element is sent once and nothing is copied. With B buckets and N ranks a group takes at most B + N - 1 broadcasts.
One receiver gets the same slices point to point, and the others hold no bucket.

Axes are gathered one after another, outermost first; then the parts of tensor-parallel or expert-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_fsdp.comm.agreement import Groups, all_agree
from megatron_fsdp.comm.collectives import Axis, all_gather_flat, as_sent, broadcast
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.sharding.placement import Placement, Region

Place = tuple[int, ...]
"""Coordinates of a rank on the mesh of a group, and last its number among ranks with other experts, if any."""


@dataclass(frozen=True)
class Parts:
    """The parts of one tensor that ranks of another mesh dimension hold."""

    group: dist.ProcessGroup
    mesh_dim: int  # in a `Place`
    dim: int | None  # that the parts are concatenated along; None: they are tensors of their own
    shapes: tuple[tuple[int, ...], ...]  # by rank


@dataclass(frozen=True)
class Entry:
    """One tensor to gather: its place, and its elements in this rank's region of main weights, maybe as a DTensor."""

    group: ParameterGroup
    index: int
    tensor: torch.Tensor
    parts: Parts | None
    version: int  # of the local tensor when the iteration began

    @property
    def shard(self) -> torch.Tensor:
        """The local elements."""
        return local_tensor(self.tensor).detach()

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.group.names[self.index]

    @property
    def numel(self) -> int:
        """Elements of the tensor that the data-parallel ranks hold together."""
        return self.group.plan.layout.tensor_numel(self.index)

    @property
    def position(self) -> tuple[int, int]:
        """The range in the group's flat buffer."""
        return self.group.plan.layout.tensor_range(self.index)


def parts_of(group: ParameterGroup, index: int) -> Parts | None:
    """Return the tensor-parallel parts of a tensor; None if every rank has all of it."""
    part = group.plan.parts[index]
    if part is None or not part.is_cut:
        return None
    shapes = part.shapes_by_rank(group.plan.layout.shapes[index])
    return Parts(part.mesh.get_group(), len(group.plan.axes), part.placement.dim, shapes)  # type: ignore[attr-defined]


def cut_into_buckets(entries: Iterable[Entry], limit_bytes: int, dtype: torch.dtype) -> Iterator[list[Entry]]:
    """Cut entries of one group into buckets that are no larger than the limit, or one tensor."""
    taken: list[Entry] = []
    numel = 0
    for entry in entries:
        layout, limit = entry.group.plan.layout, limit_bytes // dtype.itemsize
        if taken and layout.numel > limit and numel + entry.numel > limit:
            yield taken
            taken, numel = [], 0
        taken.append(entry)
        numel += entry.numel
    if taken:
        yield taken


def gather(
    bucket: Sequence[Entry],
    dtype: torch.dtype,
    limit_bytes: int,
    place: Place = (),
    receiver: Place | None = None,
    is_gathered: bool = False,
    agreeing: Groups | None = None,
) -> list[list[torch.Tensor]] | None:
    """Gather tensors of one group, cast to a dtype before they are sent; collective.

    Args:
        bucket: Of entries whose parts, if any, lie on the same ranks.
        dtype: Of the full tensors.
        limit_bytes: Up to which the whole buffer of the group is gathered at once.
        place: Of this rank, where there is a receiver.
        receiver: The one rank that gets the tensors; None: all do.
        is_gathered: The entries hold all elements already, so that only parts are left to gather.
        agreeing: Those that reach all ranks, which agree that each has memory before it sends; None: they do not.

    Returns:
        For each entry its full tensor, or one for each rank where parts are tensors of their own; None on ranks that
        are not the receiver.
    """
    group, parts = bucket[0].group, bucket[0].parts
    plan, layout = group.plan, group.plan.layout
    ordered = sorted(bucket, key=lambda entry: entry.position)
    is_whole = receiver is None and layout.numel * dtype.itemsize <= limit_bytes
    levels = [] if is_gathered else _levels(group)
    held = Region(0, layout.numel) if is_gathered else plan.main_region
    left = {dim for dim, _, _ in levels} | ({parts.mesh_dim} if parts is not None else set())

    def takes_part() -> bool:
        """Return True without a receiver, or if it has this rank's coordinates in all dimensions gathered already."""
        return receiver is None or all(dim in left or place[dim] == receiver[dim] for dim in range(len(place)))

    if not takes_part():
        return None
    starts, numel = {}, 0
    for entry in ordered:
        starts[entry.index] = entry.position[0] if is_whole else numel
        numel += entry.numel
    if receiver is not None and levels and place[levels[0][0]] != receiver[levels[0][0]]:
        _send_own(ordered, starts, levels[0], dtype, receiver)
        return None
    with all_agree("allocating full tensors", agreeing) if agreeing and (levels or parts) else nullcontext():
        full = torch.empty(layout.numel if is_whole else numel, dtype=dtype, device=plan.device)
        for entry in ordered:
            first = starts[entry.index] + layout.range_in(entry.index, held)[0]
            full[first : first + entry.shard.numel()].copy_(entry.shard.reshape(-1))
    for dim, axis, region in levels:
        target = None if receiver is None else receiver[dim]
        if is_whole:
            own = _cut(region, axis, axis.rank)
            axis.all_gather(full[region.start : region.stop], full[own.start : own.stop], async_op=False)
        else:
            owned = partial(_owned, ordered, starts, region, axis)
            _exchange([[full[a:b] for a, b in owned(rank)] for rank in range(axis.num_ranks)], axis.group, target)
        left.discard(dim)
        if not takes_part():
            return None
    views = [full[starts[entry.index] :][: entry.numel].view(layout.shapes[entry.index]) for entry in bucket]
    if parts is None:
        return [[view] for view in views]
    del full
    return _with_parts(bucket, views, None if receiver is None else receiver[parts.mesh_dim])


def _levels(group: ParameterGroup) -> list[tuple[int, Axis, Region]]:
    """List the axes that main weights are cut over, outermost first, with the region that is whole after each."""
    found, region = [], Region(0, group.plan.layout.numel)
    axes, placements = group.plan.axes, group.plan.placements.main_weight
    for dim in reversed(range(len(axes))):
        if placements[dim] is Placement.SHARD and axes[dim].num_ranks > 1:
            found.append((dim, axes[dim], region))
            region = _cut(region, axes[dim], axes[dim].rank)
    return found[::-1]


def _cut(region: Region, axis: Axis, rank: int) -> Region:
    length = region.numel // axis.num_ranks
    return Region(region.start + rank * length, region.start + (rank + 1) * length)


def _owned(
    ordered: Sequence[Entry], starts: dict[int, int], region: Region, axis: Axis, rank: int
) -> list[tuple[int, int]]:
    """List the ranges of a bucket that a rank of an axis owns; neighbours are one."""
    found: list[tuple[int, int]] = []
    for entry in ordered:
        first, last = entry.group.plan.layout.range_in(entry.index, _cut(region, axis, rank))
        start, stop = starts[entry.index] + first, starts[entry.index] + last
        if start == stop:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


def _send_own(
    ordered: Sequence[Entry],
    starts: dict[int, int],
    level: tuple[int, Axis, Region],
    dtype: torch.dtype,
    receiver: Place,
) -> None:
    """Send this rank's part of a bucket to the receiver, without memory for the rest."""
    dim, axis, region = level
    shards = [entry.shard.to(entry.group.plan.device, dtype).reshape(-1) for entry in ordered if entry.shard.numel()]
    own = torch.cat(shards) if shards else torch.empty(0)
    ranges = _owned(ordered, starts, region, axis, axis.rank)
    slices: list[Sequence[torch.Tensor]] = [()] * axis.num_ranks
    slices[axis.rank] = own.split([stop - start for start, stop in ranges]) if ranges else ()
    _exchange(slices, axis.group, receiver[dim])


def _exchange(slices: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup | None, target: int | None) -> None:
    """Send each rank's slices to all ranks of a group, or to one of them, and wait."""
    works: Sequence[dist.Work | None]
    if target is None:
        works = [broadcast(each, group, rank, async_op=True) for rank, own in enumerate(slices) for each in own]
    else:
        rank = dist.get_rank(group)
        sends = [(dist.isend, target, each) for each in slices[rank] if rank != target]
        receives = [
            (dist.irecv, source, each) for source, own in enumerate(slices) for each in own if rank == target != source
        ]
        operations = [
            dist.P2POp(function, as_sent(each), group=group, group_peer=peer)
            for function, peer, each in sends + receives
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
    for work in works:
        if work is not None:
            work.wait()


def _with_parts(
    bucket: Sequence[Entry], views: Sequence[torch.Tensor], target: int | None
) -> list[list[torch.Tensor]] | None:
    """Exchange the parts of a bucket's tensors, and put them together."""
    parts = [entry.parts for entry in bucket if entry.parts is not None]
    group = parts[0].group
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = [sum(math.prod(each.shapes[source]) for each in parts) for source in range(num_ranks)]
    sent = torch.cat([view.reshape(-1) for view in views])
    if target is None and len(set(sizes)) == 1:
        flat = sent.new_empty(sum(sizes))
        all_gather_flat(as_sent(flat), as_sent(sent), group=group)
        received = list(flat.split(sizes))
    else:
        gets_all = target in (None, rank)
        received = [sent if source == rank else sent.new_empty(size * gets_all) for source, size in enumerate(sizes)]
        _exchange([[each] if each.numel() else [] for each in received], group, target)
    if target not in (None, rank):
        return None
    found, at = [], [0] * num_ranks
    for each in parts:
        pieces = []
        for source, shape in enumerate(each.shapes):
            numel = math.prod(shape)
            pieces.append(received[source][at[source] : at[source] + numel].view(shape))
            at[source] += numel
        found.append(pieces if each.dim is None else [torch.cat(pieces, each.dim)])
    return found
