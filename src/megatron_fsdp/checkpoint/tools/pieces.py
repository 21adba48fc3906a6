"""Boxes of tensors against one another, and pieces of a stored tensor one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_fsdp.boxes import Box
from megatron_fsdp.checkpoint.folder import CheckpointFolder


@dataclass(frozen=True)
class Piece:
    """Some values of a tensor.

    Attributes:
        box: Where they are, in coordinates of the tensor.
        values: Shaped as the box.
    """

    box: Box
    values: torch.Tensor

    def part(self, box: Box) -> torch.Tensor:
        """The values of a box inside of this one."""
        return self.values[inside(self.box, box)]


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None where they share nothing."""
    firsts = tuple(map(max, a.offsets, b.offsets))
    lasts = tuple(min(i + n, j + m) for i, n, j, m in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True))
    lengths = tuple(last - first for first, last in zip(firsts, lasts, strict=True))
    return Box(firsts, lengths) if all(length > 0 for length in lengths) else None


def inside(outer: Box, inner: Box) -> tuple[slice, ...]:
    """A box as indices into another that holds it."""
    firsts = [i - o for i, o in zip(inner.offsets, outer.offsets, strict=True)]
    return tuple(slice(first, first + length) for first, length in zip(firsts, inner.lengths, strict=True))


def pieces(folder: CheckpointFolder, key: str, wanted: Box | None = None) -> Iterator[Piece]:
    """The chunks of a tensor (or what a box holds of them), read one at a time.

    Raises:
        CheckpointError: Bytes are damaged.
    """
    entry = folder.tensors[key]
    for index, chunk in enumerate(entry.chunks):
        shared = chunk.box if wanted is None else meet(chunk.box, wanted)
        if shared is not None and shared.numel:
            yield Piece(shared, folder.read_chunk(key, index)[inside(chunk.box, shared)])
