"""Pieces of a stored tensor, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.sharding.shards import Box


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
        return self.values[box.inside(self.box).indices]


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


def pieces(folder: CheckpointFolder, key: str, wanted: Box | None = None) -> Iterator[Piece]:
    """The chunks of a tensor (or what a box holds of them), read one at a time.

    Raises:
        CheckpointError: Bytes are damaged.
    """
    entry = folder.tensors[key]
    for index, chunk in enumerate(entry.chunks):
        shared = chunk.box if wanted is None else chunk.box.meet(wanted)
        if shared is not None and shared.numel:
            yield Piece(shared, folder.read_chunk(key, index)[shared.inside(chunk.box).indices])
