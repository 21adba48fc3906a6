"""Reads part of a chunk without the rest of it, such as one layer of a stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import IO

import torch
from torch import Tensor

from megatron_fsdp.checkpoint.archive import load_without_elements
from megatron_fsdp.checkpoint.safe_read import reading
from megatron_fsdp.sharding.shards import Box

_MAX_AXES = 2  # layers and experts


class ChunkIndex:
    """The boxes of one tensor's chunks, indexed by their position along the first axes; there may be thousands.

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

    def candidates(self, wanted: Box) -> Iterator[int]:
        """Yield chunks that may meet a box; all that do are among them."""
        ranges = [
            range(first // step, (first + length - 1) // step + 1)
            for first, length, step in zip(wanted.offsets, wanted.lengths, self._steps, strict=False)
        ]
        for cell in product(*ranges):
            yield from self._cells.get(cell, ())

    def meeting(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yield the chunks that share elements with a box, each with the shared box in global coordinates."""
        for i in self.candidates(wanted) if wanted.numel else ():
            shared = self._boxes[i].meet(wanted)
            if shared is not None:
                yield i, shared


def stretch_of(shape: Sequence[int], box: Box) -> int | None:
    """Return the first element of a box that is contiguous in the flattened tensor; None if it is not."""
    partial = max((axis for axis, n in enumerate(box.lengths) if n != shape[axis]), default=0)
    if any(length != 1 for length in box.lengths[:partial]):
        return None
    start = 0
    for at, length in zip(box.offsets, shape, strict=True):
        start = start * length + at
    return start


def place_of_elements(stream: IO[bytes], shape: tuple[int, ...], dtype: torch.dtype, where: str) -> int | None:
    """Find where the elements begin in an archive of `torch.save`; None if they are not stored as in memory.

    Args:
        stream: With the archive; its elements are not read.
        shape: Of the tensor in it.
        dtype: Of the elements.
        where: Names the file (and the entry) in messages.

    Raises:
        CheckpointError: The archive is damaged.
    """
    with reading(where):
        found = load_without_elements(stream, where)
        is_whole = isinstance(found, Tensor) and (tuple(found.shape), found.dtype) == (shape, dtype)
        if not is_whole or not found.is_contiguous() or found.storage_offset() or found.is_conj() or found.is_neg():
            return None
    place: int | None = found.untyped_storage()._checkpoint_offset
    return place
