"""A stretch of a tensor's flattened elements as axis-aligned boxes of the tensor. Pure.

    shape (4, 3), elements 2..9      . . x        head: the rest of a row
                                     x x x        body: whole rows
                                     x x x
                                     . . .        (a tail would follow here)

Checkpoint formats describe a shard by offsets and lengths per dimension, and a shard that is cut inside a row is not
one box but a few: at most 2 * ndim - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a tensor whose elements are contiguous in the flattened tensor.

    Attributes:
        offsets: First index per dimension.
        lengths: Number of indices per dimension.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def indices(self) -> tuple[slice, ...]:
        """The box as an index into its tensor."""
        return tuple(slice(first, first + length) for first, length in zip(self.offsets, self.lengths, strict=True))

    def inside(self, outer: Box) -> Box:
        """The same box in coordinates of one around it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def meet(self, other: Box) -> Box | None:
        """What two boxes of one tensor share; None where that is nothing."""
        offsets, lengths = [], []
        for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            first, last = max(a, b), min(a + n, b + m)
            if first >= last:
                return None
            offsets.append(first)
            lengths.append(last - first)
        return Box(tuple(offsets), tuple(lengths))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cover elements [start, stop) of the flattened tensor with boxes, in flattened order.

    Args:
        shape: Of the tensor; `()` is a scalar.
        start: First element, 0 <= start <= stop.
        stop: One past the last element, at most the tensor's numel.

    Returns:
        Boxes that follow one another and do not overlap; none for an empty range.
    """
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
