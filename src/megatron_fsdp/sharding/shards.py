"""The local shards of a global tensor on every rank of a mesh, computed without communication. Pure.

A global tensor is cut in up to two steps. Tensor parallelism cuts it once along one of its dimensions (or not at all);
what one tensor-parallel rank has is its *part*. Data parallelism cuts the flattened part into consecutive ranges, one
per *shard*, which need not be equal, nor whole rows, nor non-empty. A range of a flattened tensor is at most
2 * ndim - 1 boxes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_fsdp.errors import ConfigurationError

# A range of a tensor's flattened elements as axis-aligned boxes of the tensor:
#
#     shape (4, 3), elements 2..9      . . x        head: the rest of a row
#                                      x x x        body: whole rows
#                                      x x x
#                                      . . .        (a tail would follow here)
#
# Checkpoint formats describe a shard by offsets and lengths per dimension, and a shard that is cut inside a row is not
# one box but a few: at most 2 * ndim - 1.


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a tensor whose elements are contiguous in the flattened tensor."""

    offsets: tuple[int, ...]  # first index per dimension
    lengths: tuple[int, ...]  # number of indices per dimension

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def indices(self) -> tuple[slice, ...]:
        """The box as an index into its tensor."""
        return tuple(slice(first, first + length) for first, length in zip(self.offsets, self.lengths, strict=True))

    def inside(self, outer: Box) -> Box:
        """Return the same box in the coordinates of an enclosing one."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def meet(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor; None where it is empty."""
        offsets, lengths = [], []
        for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            first, last = max(a, b), min(a + n, b + m)
            if first >= last:
                return None
            offsets.append(first)
            lengths.append(last - first)
        return Box(tuple(offsets), tuple(lengths))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cover elements [start, stop) of the flattened tensor with boxes, in flattened order."""
    if start >= stop:
        return ()
    if not shape:
        return (Box((), ()),)
    row_numel = math.prod(shape[1:])
    first_row, in_first = divmod(start, row_numel)
    last_row, in_last = divmod(stop, row_numel)
    if first_row == last_row:
        return _within(shape, first_row, in_first, in_last)
    found: list[Box] = []
    if in_first:
        found += _within(shape, first_row, in_first, row_numel)
        first_row += 1
    if first_row < last_row:
        found.append(Box((first_row, *(0 for _ in shape[1:])), (last_row - first_row, *shape[1:])))
    if in_last:
        found += _within(shape, last_row, 0, in_last)
    return tuple(found)


def _within(shape: Sequence[int], row: int, start: int, stop: int) -> tuple[Box, ...]:
    inner = boxes_of_range(shape[1:], start, stop)
    return tuple(Box((row, *box.offsets), (1, *box.lengths)) for box in inner)


Range = tuple[int, int]


@dataclass(frozen=True)
class BufferCut:
    """The shard ranges of a tensor in a flat buffer of equal shards."""

    offset: int  # first element of the tensor in the buffer
    shard_numel: int  # elements of one shard of the buffer
    num_shards: int  # of the buffer
    numel: int  # elements of the tensor

    def range_of(self, shard: int) -> Range:
        """Return the half-open range of the flattened tensor in one shard; start equals stop for none."""
        start, stop = shard * self.shard_numel - self.offset, (shard + 1) * self.shard_numel - self.offset
        return min(max(start, 0), self.numel), min(max(stop, 0), self.numel)

    def is_multiple_of(self, step: int) -> bool:
        """Return True if every shard edge inside the tensor is a multiple of `step`."""
        if self.numel == 0 or self.num_shards == 1:
            return True
        first = (self.offset // self.shard_numel + 1) * self.shard_numel - self.offset
        if first >= self.numel:
            return True
        return first % step == 0 and (first + self.shard_numel >= self.numel or self.shard_numel % step == 0)

    @property
    def whole_shard(self) -> int | None:
        """The only shard with elements; None if several have some, or there is one shard."""
        shard = self.offset // self.shard_numel if self.num_shards > 1 and self.numel else None
        return shard if shard is not None and self.range_of(shard) == (0, self.numel) else None

    @property
    def largest_numel(self) -> int:
        """An upper bound of the elements of a shard; the same number on every rank."""
        return min(self.shard_numel, self.numel)


@dataclass(frozen=True)
class ListedCut:
    """Shard ranges by their edges: shard s holds [edges[s], edges[s + 1])."""

    edges: tuple[int, ...]  # from 0 to the number of elements, never falling

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.edges) - 1

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.edges[-1]

    def range_of(self, shard: int) -> Range:
        """Return the half-open range of the flattened tensor in one shard."""
        return self.edges[shard], self.edges[shard + 1]

    def is_multiple_of(self, step: int) -> bool:
        """Return True if every shard edge inside the tensor is a multiple of `step`."""
        return all(edge % step == 0 for edge in self.edges if 0 < edge < self.numel)

    @property
    def whole_shard(self) -> int | None:
        """The only shard with elements; None if several have some, or there is one shard."""
        shard = bisect.bisect_right(self.edges, 0) - 1
        return (
            shard if self.num_shards > 1 and shard < self.num_shards and self.edges[shard + 1] == self.numel else None
        )

    @property
    def largest_numel(self) -> int:
        """Elements of the largest shard."""
        return max(stop - start for start, stop in itertools.pairwise(self.edges))


Cut = BufferCut | ListedCut


@dataclass(frozen=True)
class TensorParallelCut:
    """The tensor-parallel ranks' parts of one dimension of the global tensor."""

    dim: int
    edges: tuple[int, ...]  # part t holds indices [edges[t], edges[t + 1])

    @classmethod
    def by_chunk(cls, length: int, num_parts: int, dim: int) -> TensorParallelCut:
        """Cut as `torch.chunk` and torch's `Shard` do: ceil(length / parts) each, the last ones less or nothing."""
        step = -(-length // num_parts)
        return cls(dim, tuple(min(part * step, length) for part in range(num_parts + 1)))


@dataclass(frozen=True)
class MeshUse:
    """The parallelism that each dimension of a mesh serves.

    Data-parallel shards are spread over `shard_dims`, the most significant first; ranks along the other dimensions hold
    the same. FSDP (0,), HSDP over (outer, inner) (1,), HFSDP cut inside first (1, 0): shard index = inner rank * outer
    size + outer rank. () where every rank holds everything.
    """

    sizes: tuple[int, ...]  # ranks along each dimension
    shard_dims: tuple[int, ...] = ()
    tensor_dim: int | None = None  # that of tensor parallelism, if any

    @property
    def num_shards(self) -> int:
        """Data-parallel shards."""
        return math.prod(self.sizes[dim] for dim in self.shard_dims)

    @property
    def num_parts(self) -> int:
        """Tensor-parallel parts."""
        return 1 if self.tensor_dim is None else self.sizes[self.tensor_dim]

    def shard_at(self, coordinate: tuple[int, ...]) -> int:
        """Return the shard of the rank at a mesh coordinate."""
        index = 0
        for dim in self.shard_dims:
            index = index * self.sizes[dim] + coordinate[dim]
        return index

    def part_at(self, coordinate: tuple[int, ...]) -> int:
        """Return the tensor-parallel rank at a mesh coordinate."""
        return 0 if self.tensor_dim is None else coordinate[self.tensor_dim]


@dataclass(frozen=True)
class ShardDescription:
    """The shards of one tensor: this rank's and every other rank's elements."""

    shape: tuple[int, ...]  # of the global tensor
    use: MeshUse  # the parallelism of each mesh dimension
    coordinate: tuple[int, ...]  # of this rank on the mesh
    cut: Cut  # the ranges of this rank's part that its data-parallel shards hold
    tensor_cut: TensorParallelCut | None = None  # by tensor parallelism; None where its ranks, if any, hold the same
    # by tensor-parallel rank, that of its part; empty where all are cut as this one (as parts of equal shape are)
    other_cuts: tuple[Cut, ...] = ()

    # ---- parts ------------------------------------------------------------------------------------------------------

    @property
    def part(self) -> int:
        """This rank's tensor-parallel part."""
        return self.use.part_at(self.coordinate)

    def part_range(self, part: int | None = None) -> Range:
        """Return the indices that a part (this rank's, if None) holds along the dimension cut by tensor parallelism."""
        assert self.tensor_cut is not None
        part = self.part if part is None else part
        return self.tensor_cut.edges[part], self.tensor_cut.edges[part + 1]

    def part_shape(self, part: int | None = None) -> tuple[int, ...]:
        """Return the shape of a part (this rank's, if None)."""
        if self.tensor_cut is None:
            return self.shape
        start, stop = self.part_range(part)
        return tuple(stop - start if dim == self.tensor_cut.dim else n for dim, n in enumerate(self.shape))

    def part_offset(self, part: int | None = None) -> tuple[int, ...]:
        """Return the offset of a part (this rank's, if None) in the global tensor."""
        if self.tensor_cut is None:
            return (0,) * len(self.shape)
        start, _ = self.part_range(part)
        return tuple(start if dim == self.tensor_cut.dim else 0 for dim in range(len(self.shape)))

    # ---- shards -----------------------------------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """Data-parallel shards of one part."""
        return self.cut.num_shards

    @property
    def shard(self) -> int:
        """The shard of this rank."""
        return self.use.shard_at(self.coordinate)

    @functools.cached_property
    def local_range(self) -> Range:
        """This rank's half-open range of its flattened part."""
        return self.cut.range_of(self.shard)

    @functools.cached_property
    def has_whole_rows(self) -> bool:
        """True if every shard of this part is whole rows of its dim 0; the same on all its shards."""
        return self._has_whole_rows(self.part, self.cut)

    @functools.cached_property
    def is_cut_inside_rows(self) -> bool:
        """True if any shard begins or ends inside a row."""
        cuts = enumerate(self.other_cuts) if self.other_cuts else [(self.part, self.cut)]
        return any(cut.num_shards > 1 and not self._has_whole_rows(part, cut) for part, cut in cuts)

    def _has_whole_rows(self, part: int, cut: Cut) -> bool:
        row_numel = math.prod(self.part_shape(part)[1:])
        return len(self.shape) > 0 and row_numel > 0 and cut.is_multiple_of(row_numel)

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor: `(rows, *rest)` where rows are whole, else `(elements,)`; the part if not cut."""
        if self.num_shards == 1:
            return self.part_shape()
        start, stop = self.local_range
        if not self.has_whole_rows:
            return (stop - start,)
        rest = self.part_shape()[1:]
        return ((stop - start) // math.prod(rest), *rest)

    @functools.cached_property
    def is_whole(self) -> bool:
        """True if every rank holds the whole global tensor."""
        return self.num_shards == 1 and (self.tensor_cut is None or self.use.num_parts == 1)

    @property
    def is_saved_here(self) -> bool:
        """True if this rank saves its elements in a checkpoint.

        Tensor-parallel ranks that hold the same, and cut it differently, must not all save it: their boxes overlap.
        """
        return self.tensor_cut is not None or not self.other_cuts or self.part == 0

    @property
    def spread_dims(self) -> tuple[int, ...]:
        """Mesh dimensions over which elements are spread, and over which a reduction must go."""
        dims = self.use.shard_dims
        if self.tensor_cut is not None and self.use.tensor_dim is not None:
            dims = (*dims, self.use.tensor_dim)
        return tuple(dim for dim in dims if self.use.sizes[dim] > 1)

    def boxes(self, shard: int | None = None, part: int | None = None) -> tuple[Box, ...]:
        """Return the elements of a shard of a part, as boxes in global coordinates, in flattened order."""
        part = self.part if part is None else part
        start, stop = self._cut_of(part).range_of(self.shard if shard is None else shard)
        if start == stop:  # soon, since of thousands of shards most have none of a small tensor
            return ()
        offset = self.part_offset(part)
        return tuple(
            Box(tuple(a + b for a, b in zip(box.offsets, offset, strict=True)), box.lengths)
            for box in boxes_of_range(self.part_shape(part), start, stop)
        )

    def boxes_at(self, coordinate: tuple[int, ...]) -> tuple[Box, ...]:
        """Return the elements of the rank at a mesh coordinate, as boxes in global coordinates."""
        return self.boxes(self.use.shard_at(coordinate), self.use.part_at(coordinate))

    def _cut_of(self, part: int) -> Cut:
        if self.other_cuts:
            return self.other_cuts[part]
        if part != self.part and self.part_shape(part) != self.part_shape():
            raise ConfigurationError(
                f"the shards of tensor-parallel part {part}, of shape {self.part_shape(part)}, were not described; "
                "give other_cuts where parts differ in shape"
            )
        return self.cut


def described_as_whole(shape: tuple[int, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> ShardDescription:
    """Return the description of a tensor that is replicated on a mesh."""
    return ShardDescription(shape, MeshUse(sizes), coordinate, ListedCut((0, math.prod(shape))))


# Splitting a tensor keeps the order of the elements that stay, so a range of the flattened tensor becomes a range of
# the flattened piece: [start, stop) turns into [rank(start), rank(stop)), where rank(x) counts the elements before x
# that belong to the piece.


def split_lengths(length: int, size_or_sections: int | Sequence[int]) -> tuple[int, ...]:
    """Return the lengths into which `torch.split` cuts a dimension."""
    if isinstance(size_or_sections, int):
        if size_or_sections < 0 or (size_or_sections == 0 and length):
            raise ConfigurationError(f"a dimension of {length} cannot be split by {size_or_sections}; give 1 or more")
        step = max(size_or_sections, 1)
        return tuple(min(step, length - start) for start in range(0, max(length, 1), step))
    lengths = tuple(int(n) for n in size_or_sections)
    if any(n < 0 for n in lengths) or sum(lengths) != length:
        raise ConfigurationError(
            f"a dimension of {length} cannot be split into {lengths}; give lengths that are not negative and add up"
        )
    return lengths


def split_ranges(length: int, size_or_sections: int | Sequence[int]) -> tuple[Range, ...]:
    """Return the half-open ranges into which `torch.split` cuts a dimension."""
    edges = [0, *itertools.accumulate(split_lengths(length, size_or_sections))]
    return tuple(itertools.pairwise(edges))


def elements_before(position: int, shape: Sequence[int], dim: int, kept: Range) -> int:
    """Count the first `position` elements of a flattened tensor whose index along `dim` is in `kept`."""
    inner = math.prod(shape[dim + 1 :])
    block = shape[dim] * inner
    first, length = kept[0] * inner, (kept[1] - kept[0]) * inner
    if block == 0:
        return 0
    blocks, rest = divmod(position, block)
    return blocks * length + min(max(rest - first, 0), length)


def narrow_description(description: ShardDescription, dim: int, start: int, stop: int) -> ShardDescription:
    """Describe the shards of `tensor.narrow(dim, start, stop - start)` where no element changes ranks."""
    tensor_cut, kept = description.tensor_cut, (start, stop)
    if tensor_cut is not None and tensor_cut.dim == dim:
        edges = tuple(min(max(edge, start), stop) - start for edge in tensor_cut.edges)
        new_tensor_cut: TensorParallelCut | None = TensorParallelCut(dim, edges)
    else:
        new_tensor_cut = tensor_cut

    def narrowed(part: int, cut: Cut) -> Cut:
        shape = description.part_shape(part)
        inside = kept_in_part(description, dim, kept, part)
        edges = [0] + [cut.range_of(shard)[1] for shard in range(cut.num_shards)]
        return ListedCut(tuple(elements_before(edge, shape, dim, inside) for edge in edges))

    shape = tuple(stop - start if axis == dim else n for axis, n in enumerate(description.shape))
    others = tuple(narrowed(part, cut) for part, cut in enumerate(description.other_cuts))
    cut = narrowed(description.part, description.cut)
    return replace(description, shape=shape, cut=cut, tensor_cut=new_tensor_cut, other_cuts=others)


def kept_in_part(description: ShardDescription, dim: int, kept: Range, part: int | None = None) -> Range:
    """Translate a range of the global dimension `dim` into the coordinates of a part, clipped to it."""
    tensor_cut = description.tensor_cut
    if tensor_cut is None or tensor_cut.dim != dim:
        return kept
    first, last = description.part_range(part)
    return min(max(kept[0], first), last) - first, min(max(kept[1], first), last) - first
