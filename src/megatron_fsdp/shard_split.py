"""What becomes of a description when its global tensor is split along a dimension. Pure.

Splitting keeps the order of the elements that stay, so a range of the flattened tensor becomes a range of the
flattened piece: [start, stop) turns into [rank(start), rank(stop)), where rank(x) counts the elements before x that
belong to the piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.shard_description import Cut, ListedCut, Range, ShardDescription, TensorParallelCut


def split_lengths(length: int, size_or_sections: int | Sequence[int]) -> tuple[int, ...]:
    """Lengths of the pieces that `torch.split` makes of a dimension.

    Raises:
        ConfigurationError: A size is negative, or 0 for a dimension that is not empty, or they do not add up.
    """
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
    """Half-open ranges of a dimension that `torch.split` makes of it."""
    edges = [0, *itertools.accumulate(split_lengths(length, size_or_sections))]
    return tuple(itertools.pairwise(edges))


def elements_before(position: int, shape: Sequence[int], dim: int, kept: Range) -> int:
    """How many of the first `position` elements of a flattened tensor have an index along `dim` in `kept`."""
    inner = math.prod(shape[dim + 1 :])
    block = shape[dim] * inner
    first, length = kept[0] * inner, (kept[1] - kept[0]) * inner
    if block == 0:
        return 0
    blocks, rest = divmod(position, block)
    return blocks * length + min(max(rest - first, 0), length)


def narrow_description(description: ShardDescription, dim: int, start: int, stop: int) -> ShardDescription:
    """The description of `tensor.narrow(dim, start, stop - start)`, where every rank keeps what it has of it."""
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
    """A range of the global dimension `dim` in the coordinates of a part, clipped to it."""
    tensor_cut = description.tensor_cut
    if tensor_cut is None or tensor_cut.dim != dim:
        return kept
    first, last = description.part_range(part)
    return min(max(kept[0], first), last) - first, min(max(kept[1], first), last) - first
