"""Tensors assembled from boxes of others, element by element: the same weights under other names and divisions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder, Chunks, ObjectEntry, Span, TensorEntry, whole_box
from megatron_fsdp.sharding.shards import Box

_NOWHERE = Span("", 0, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """A box (`source`) of the tensor `key` that is a box (`target`) of another tensor, its elements in the same order.

    Both have the same lengths but for those of 1, of which either may have more.
    """

    key: str
    source: Box
    target: Box

    @classmethod
    def whole(cls, key: str, shape: Sequence[int]) -> Part:
        """Return the part that is all of a tensor, as all of another one."""
        return cls(key, whole_box(shape), whole_box(shape))

    def to_source(self, box: Box) -> Box:
        """Translate a box inside of the target to the source."""
        return _translated(box, self.target, self.source)

    def to_target(self, box: Box) -> Box:
        """Translate a box inside of the source to the target."""
        return _translated(box, self.source, self.target)


def _translated(box: Box, outer: Box, other: Box) -> Box:
    steps = zip(box.inside(outer).offsets, box.lengths, outer.lengths, strict=True)
    kept = iter([(first, length) for first, length, total in steps if total != 1])
    steps_there = [next(kept) if total != 1 else (0, 1) for total in other.lengths]
    offsets = tuple(start + first for start, (first, _) in zip(other.offsets, steps_there, strict=True))
    return Box(offsets, tuple(length for _, length in steps_there))


class RearrangedFolder(CheckpointFolder):
    """A checkpoint whose tensors consist of disjoint parts of those in `stored`, and whose objects are given."""

    def __init__(
        self, stored: CheckpointFolder, tensors: Mapping[str, Sequence[Part]], objects: Mapping[str, object]
    ) -> None:
        """Present tensors and objects; nothing is read (the base class, which opens a folder, is not initialised)."""
        self.stored, self.path, self._parts, self._values = stored, stored.path, tensors, dict(objects)
        self.paths = {}
        self.tensors = {key: self._entry(key, parts) for key, parts in tensors.items()}
        self.objects = {key: ObjectEntry(key, _NOWHERE) for key in self._values}

    def _entry(self, key: str, parts: Sequence[Part]) -> TensorEntry:
        """Describe a tensor as one chunk for each part."""
        ends = [[at + n for at, n in zip(part.target.offsets, part.target.lengths, strict=True)] for part in parts]
        shape = tuple(max(column) for column in zip(*ends, strict=True))
        chunks = Chunks.of(len(shape), [part.target for part in parts], [_NOWHERE] * len(parts))
        return TensorEntry(key, shape, self.stored.tensors[parts[0].key].dtype, chunks)

    def _read_part(self, entry: TensorEntry, number: int, wanted: Box) -> torch.Tensor:
        """Read elements of one part from the stored checkpoint."""
        part = self._parts[entry.key][number]
        box = part.to_source(wanted)
        return self.stored.read_box(part.key, box.offsets, box.lengths).reshape(wanted.lengths)

    def read_object(self, key: str) -> object:
        """Return a given object."""
        return self._values[key]

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the files of the stored checkpoint open."""
        with self.stored.kept_open():
            yield
