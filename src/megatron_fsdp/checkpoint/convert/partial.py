"""Read part of a chunk without the rest of it: a chunk may be a stack of layers, and what is wanted one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import IO

import torch
from torch import Tensor

from megatron_fsdp.checkpoint.folder import CheckpointFolder, ChunkEntry, TensorEntry
from megatron_fsdp.checkpoint.safe_read import load_weights, reading
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

_MAX_AXES = 2  # layers and experts
_BEHIND_CONTENTS = (b"PK\7\x08", b"PK\3\4", b"PK\1\2")  # their data descriptor, another record, or the directory


class ChunkIndex:
    """The boxes of one tensor's chunks, by where they lie along its first axes: there may be many thousands.

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
        """Chunks that may meet a box; all that do are among them."""
        ranges = [
            range(first // step, (first + length - 1) // step + 1)
            for first, length, step in zip(wanted.offsets, wanted.lengths, self._steps, strict=False)
        ]
        for cell in product(*ranges):
            yield from self._cells.get(cell, ())

    def meeting(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Chunks that share elements with a box, each with what they share, in global coordinates."""
        for i in self.candidates(wanted) if wanted.numel else ():
            shared = self._boxes[i].meet(wanted)
            if shared is not None:
                yield i, shared


class SparingReader:
    """Reads boxes as `CheckpointFolder.read_box` does, holding hardly more than the box.

    Args:
        folder: Open.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._indices: dict[str, ChunkIndex] = {}
        self._places: dict[tuple[str, int], int | None] = {}

    def read_box(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A box of a tensor.

        Args:
            key: Of the tensor.
            offsets: First index along each dimension.
            lengths: Along each dimension.

        Raises:
            CheckpointError: As of `CheckpointFolder.read_box`.
        """
        wanted = Box(tuple(offsets), tuple(lengths))
        entry = self._folder.tensor_with(key, wanted)
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = ChunkIndex([chunk.box for chunk in entry.chunks])
        result: Tensor | None = None
        for number, shared in index.meeting(wanted):
            values = self._read_part(entry, number, shared)
            if shared == wanted:
                return values
            result = torch.empty(wanted.lengths, dtype=entry.dtype) if result is None else result
            result[shared.inside(wanted).indices] = values
            del values
        return torch.empty(wanted.lengths, dtype=entry.dtype) if result is None else result

    def _read_part(self, entry: TensorEntry, number: int, wanted: Box) -> Tensor:
        """The elements of a box inside a chunk."""
        chunk = entry.chunks[number]
        inside = wanted.inside(chunk.box)
        stretch = None if wanted == chunk.box or chunk.transforms else _stretch_of(chunk.box.lengths, inside)
        if stretch is None:
            return self._folder.read_chunk(entry.key, number)[inside.indices]
        where = f"{entry.key} in {self._folder.path / chunk.span.file}"
        with self._folder.opened(chunk.span, (), where) as stream, reading(where):
            if (entry.key, number) not in self._places:
                self._places[entry.key, number] = _place_of_elements(stream, entry, chunk, where)
            place = self._places[entry.key, number]
            if place is not None:
                size = entry.dtype.itemsize
                raw = bytearray(wanted.numel * size)
                stream.seek(place + stretch * size)
                stream.readinto(raw)  # type: ignore[attr-defined]
                return torch.frombuffer(raw, dtype=entry.dtype).reshape(wanted.lengths)
        return self._folder.read_chunk(entry.key, number)[inside.indices]


def _stretch_of(shape: Sequence[int], box: Box) -> int | None:
    """First element, where a box is one stretch of the flattened tensor."""
    partial = max((axis for axis, n in enumerate(box.lengths) if n != shape[axis]), default=0)
    if any(length != 1 for length in box.lengths[:partial]):
        return None
    start = 0
    for at, length in zip(box.offsets, shape, strict=True):
        start = start * length + at
    return start


def _place_of_elements(stream: IO[bytes], entry: TensorEntry, chunk: ChunkEntry, where: str) -> int | None:
    """Where the elements begin in the archive of `torch.save`; None where they are not as they are in memory.

    Raises:
        CheckpointError: The archive is damaged.
    """
    found = load_weights(stream, where, "meta")  # reads no elements
    is_whole = isinstance(found, Tensor) and (found.shape, found.dtype) == (chunk.box.lengths, entry.dtype)
    if not is_whole or not found.is_contiguous() or found.storage_offset() or found.is_conj() or found.is_neg():
        return None
    storage = found.untyped_storage()
    place: int = storage._checkpoint_offset
    stream.seek(place + storage.nbytes())
    if stream.read(4) not in _BEHIND_CONTENTS:  # the place is told by two lengths that no checksum covers
        raise CheckpointError(f"{where} is damaged: its elements do not begin where it says; restore it from a copy")
    return place
