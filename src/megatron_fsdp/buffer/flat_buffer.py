"""One contiguous local tensor, the layout that says what lies where in it, and how it lies on the sharding axis."""

from __future__ import annotations

import torch

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.layout import Layout
from megatron_fsdp.placement import Placement


class FlatBuffer:
    """Every tensor of one layout in one flat local tensor.

    A `SHARD` buffer holds this rank's part, (shard_numel,); a `REPLICATE` buffer holds all parts, (numel,), and this
    rank's part is a slice of it. Invariant: the parts of all ranks, in rank order, are the full buffer.
    """

    def __init__(
        self, layout: Layout, axis: Axis, placement: Placement, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.axis = axis
        self.placement = placement
        numel = layout.shard_numel if placement is Placement.SHARD else layout.numel
        self.local = torch.zeros(numel, dtype=dtype, device=device)

    @classmethod
    def slice_of(cls, full: FlatBuffer) -> FlatBuffer:
        """This rank's part of a replicated buffer as a buffer of its own, sharing the memory."""
        part = cls.__new__(cls)
        part.layout, part.axis, part.placement = full.layout, full.axis, Placement.SHARD
        part.local = full.part
        return part

    @property
    def part(self) -> torch.Tensor:
        """This rank's part, (shard_numel,), a view."""
        if self.placement is Placement.SHARD:
            return self.local
        start, stop = self.layout.shard_range(self.axis.rank)
        return self.local[start:stop]

    def piece(self, index: int) -> torch.Tensor:
        """What this rank owns of tensor `index`, a view, maybe empty: (rows, *rest) or, where rows are cut, (n,)."""
        if self.placement is not Placement.SHARD:
            return full_view(self.layout, self.local, index)
        return part_view(self.layout, self.axis.rank, self.local, index)

    def store(self, index: int, tensor: torch.Tensor) -> None:
        """Copy the full tensor's local piece in, casting to this buffer's dtype."""
        flat = tensor.detach().reshape(-1)
        if self.placement is Placement.SHARD:
            start, stop = self.layout.local_range(index, self.axis.rank)
            flat = flat[start:stop]
        self.piece(index).view(-1).copy_(flat)

    def gather_into(self, full: torch.Tensor) -> torch.distributed.Work | None:
        """Start gathering all parts into `full` (numel,); for a replicated buffer that is its own memory."""
        return self.axis.all_gather(full, self.part)


def full_view(layout: Layout, full: torch.Tensor, index: int) -> torch.Tensor:
    """Tensor `index`, in its own shape, as a view of a full flat buffer (numel,)."""
    start, stop = layout.tensor_range(index)
    return full[start:stop].view(layout.shapes[index])


def part_view(layout: Layout, rank: int, part: torch.Tensor, index: int) -> torch.Tensor:
    """What `rank` owns of tensor `index`, as a view of that rank's part (shard_numel,)."""
    start, stop = layout.local_range(index, rank)
    shape = layout.local_shape(index, rank)
    if start == stop:
        return part[:0].view(shape)
    first = layout.tensor_range(index)[0] + start - layout.shard_range(rank)[0]
    return part[first : first + stop - start].view(shape)


def padding_ranges(layout: Layout) -> tuple[tuple[int, int], ...]:
    """The stretches (start, stop) of the full buffer that belong to no tensor."""
    taken = sorted(layout.tensor_range(index) for index in range(len(layout.shapes)))
    gaps, cursor = [], 0
    for start, stop in taken:
        if stop == start:
            continue
        if start > cursor:
            gaps.append((cursor, start))
        cursor = stop
    if cursor < layout.numel:
        gaps.append((cursor, layout.numel))
    return tuple(gaps)
