"""Find the chunks that a box meets without looking at all of them: a stack of layers and experts has many thousands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from megatron_fsdp.sharding.shards import Box

_MAX_AXES = 2  # layers and experts


class ChunkIndex:
    """The boxes of one tensor's chunks, by where they lie along its first axes.

    Only axes along which all boxes have the same length are used (so they begin at multiples of it, since they cover
    the tensor); the others do not narrow the search.

    Args:
        boxes: Of the chunks; those without elements are never found.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        filled = [(i, box) for i, box in enumerate(boxes) if box.numel]
        self._steps: list[int] = []
        for axis in range(min(_MAX_AXES, len(filled[0][1].offsets)) if filled else 0):
            step = filled[0][1].lengths[axis]
            if any(box.lengths[axis] != step for _, box in filled):
                break
            self._steps.append(step)
        self._cells: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, box in filled:
            self._cells[tuple(at // step for at, step in zip(box.offsets, self._steps, strict=False))].append(i)

    def candidates(self, offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[int]:
        """Chunks that may meet a box; all that do are among them."""
        ranges = [
            range(first // step, (first + length - 1) // step + 1)
            for first, length, step in zip(offsets, lengths, self._steps, strict=False)
        ]
        for cell in product(*ranges):
            yield from self._cells.get(cell, ())

    def meeting(self, offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, Box]]:
        """Chunks that share elements with a box, each with what they share, in global coordinates."""
        if 0 in lengths:
            return
        wanted = Box(tuple(offsets), tuple(lengths))
        for i in self.candidates(offsets, lengths):
            shared = self._boxes[i].meet(wanted)
            if shared is not None:
                yield i, shared
