"""One checkpoint folder, open for reading by one process, on the CPU, without running code from it."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_fsdp.checkpoint.archive import load_object, load_tensor, place_of_elements
from megatron_fsdp.checkpoint.manifest import FILE_NAME, Manifest
from megatron_fsdp.checkpoint.metadata_reader import Integers, Rows, load_metadata
from megatron_fsdp.checkpoint.safe_read import (
    ELEMENT_BYTES,
    MAX_DEPTH,
    MAX_OBJECT_BYTES,
    TOO_MANY,
    ReadingBudget,
    are_lengths,
    open_file,
    printable,
    reading,
)
from megatron_fsdp.errors import CheckpointError, has_control_characters
from megatron_fsdp.sharding.shards import Box

_MAX_NAME_BYTES = 255
_MAX_KEY_LENGTH = 4096
_MAX_LIST_ITEMS = 1 << 20  # torch makes a list as long as the largest index in a path
_PRIME = (1 << 31) - 1  # products of two numbers below it have 64 bits

METADATA = ".metadata"
_MAX_ARCHIVE_OVERHEAD = 1 << 20
_MAX_SHARING = 16  # how often the bytes of a file may be named, on average; writers name them once
_AT_ONCE_BYTES = 1 << 18
_MOST_OPEN = 64  # files at a time

_Opened = tuple[io.BufferedReader | io.BytesIO, str]
"""Some bytes as a file, and their name for messages."""


@dataclass(frozen=True)
class Span:
    """Consecutive bytes of one file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ChunkEntry:
    """A box of a tensor, and the bytes of its `torch.save`."""

    box: Box
    span: Span


class BoxIndex:
    """The disjoint boxes of a tensor, indexed by place; there may be thousands of them."""

    def __init__(self, offsets: Integers, lengths: Integers) -> None:
        self._first, self._lengths = offsets.astype(np.int64), lengths.astype(np.int64)
        self._end, self.numel = self._first + self._lengths, self._lengths.prod(axis=1)

    def __getitem__(self, number: int) -> Box:
        return Box(tuple(self._first[number].tolist()), tuple(self._lengths[number].tolist()))

    def meeting(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yield the boxes that overlap with one, each with the overlap in global coordinates."""
        if not wanted.numel:
            return
        first = np.array(wanted.offsets, np.int64)
        meets = (self._first < first + wanted.lengths) & (first < self._end)
        for number in np.flatnonzero(meets.all(-1)).tolist():
            shared = self[number].meet(wanted)
            if shared is not None:
                yield number, shared

    def cover_problem(self, shape: tuple[int, ...]) -> str | None:
        """Describe the fault of boxes that should hold each element of a tensor once; None if there is none."""
        is_outside = self._end > shape if self._end.shape[1] == len(shape) else np.ones_like(self._end, np.bool_)
        if is_outside.any():
            box = self[int(is_outside.any(axis=1).argmax())]
            return f"has a chunk outside of it, at {box.offsets} with lengths {box.lengths}"
        total, wanted = int(self.numel.sum()), math.prod(shape)
        if total != wanted:
            state = "is incomplete" if total < wanted else "has elements more than once"
            return f"{state}: its chunks hold {total} elements of {wanted}"
        return None if self._tiles(shape) else "has elements more than once"

    def _tiles(self, shape: tuple[int, ...]) -> bool:
        """Return True if boxes inside a tensor hold each element once.

        Their volumes are added up, with every coordinate moved to a random place of its own: the sum is the volume of
        the whole tensor if each element is in one box, and otherwise with odds of (number of dimensions) / `_PRIME` in
        each of three tries.
        """
        draws, count = np.random.default_rng(), len(self.numel)  # from the system's entropy, which no file foresees
        volumes = np.ones((3, count + 1), np.int64)  # the last one is that of the whole
        for dim, total in enumerate(shape):
            edges = np.concatenate((self._first[:, dim], [0], self._end[:, dim], [total]))
            values, place = np.unique(edges, return_inverse=True)
            moved = draws.integers(_PRIME, size=(3, len(values)))[:, place]
            volumes = volumes * (moved[:, count + 1 :] - moved[:, : count + 1]) % _PRIME
        return bool((volumes[:, :-1].sum(axis=1) % _PRIME == volumes[:, -1]).all())


@dataclass(frozen=True, eq=False)
class Chunks(Sequence[ChunkEntry]):
    """The chunks of a tensor as arrays; those that are asked for become entries."""

    boxes: BoxIndex
    names: Sequence[str]  # of files
    files: Integers  # (chunks,), numbers of names
    offsets: Integers  # (chunks,)
    lengths: Integers  # (chunks,)

    @classmethod
    def of(cls, num_dims: int, boxes: Sequence[Box], spans: Sequence[Span]) -> Chunks:
        """Join boxes with their spans."""
        corners = np.array([(box.offsets, box.lengths) for box in boxes], np.int64).reshape(len(boxes), 2, num_dims)
        names = list(dict.fromkeys(span.file for span in spans))
        numbers = {name: number for number, name in enumerate(names)}
        rows = [(numbers[span.file], span.offset, span.length) for span in spans]
        return cls(BoxIndex(corners[:, 0], corners[:, 1]), names, *np.array(rows, np.int64).reshape(-1, 3).T)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> ChunkEntry:  # type: ignore[override]
        span = Span(self.names[self.files[number]], int(self.offsets[number]), int(self.lengths[number]))
        return ChunkEntry(self.boxes[number], span)


@dataclass(frozen=True)
class TensorEntry:
    """One global tensor, and the chunks that cover it, each element once."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Chunks

    @property
    def numel(self) -> int:
        """The elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the global tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class ObjectEntry:
    """One object that is no tensor, and the bytes of its `torch.save`."""

    key: str
    span: Span


def _entries_of(metadata: object, where: str) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
    """Return the tensors and objects that metadata describe, in the order of names; everything is checked."""
    described: Any = getattr(metadata, "state_dict_metadata", None)
    storage: Any = getattr(metadata, "storage_data", None)
    if not (isinstance(described, dict) and isinstance(storage, dict)):
        raise CheckpointError(f"{where} is not the metadata of torch.distributed.checkpoint; give a folder it wrote")
    reader, tensors, objects = _TensorReader(storage, where), {}, {}
    for key, found in sorted(described.items(), key=lambda item: str(item[0])):
        if not isinstance(key, str):
            raise CheckpointError(f"{where} has a key that is not text but {type(key).__name__}")
        if has_control_characters(key):
            raise CheckpointError(f"{where} has a key with control characters: {key!a:.200}")
        if len(key) > _MAX_KEY_LENGTH or key.count(".") > MAX_DEPTH:
            raise CheckpointError(
                f"{where} has a key of {len(key)} characters and {key.count('.')} dots, {key:.100}...; at most "
                f"{_MAX_KEY_LENGTH} and {MAX_DEPTH} are read"
            )
        if isinstance(found, TensorStorageMetadata):
            tensors[key] = reader.entry(key, found)
        elif isinstance(found, BytesStorageMetadata):
            objects[key] = ObjectEntry(key, _span(storage, MetadataIndex(key), where))
        else:
            raise CheckpointError(f"{where}: {key} is neither a tensor nor an object but {type(found).__name__}")
    return tensors, objects


class _TensorReader:
    """Makes entries of tensors; boxes that tensors share in the metadata are checked once for a shape."""

    def __init__(self, storage: dict[Any, Any], where: str) -> None:
        self._storage, self._where = storage, where
        self._shared: dict[Rows, BoxIndex] = {}
        self._fitting: set[tuple[BoxIndex, tuple[int, ...]]] = set()
        places = [found for found in storage.values() if isinstance(found, Rows)]
        self._files = np.unique(np.concatenate([np.empty(0, np.int32), *(np.unique(found.files) for found in places)]))
        self._names = [_plain_name(places[0].memo.get(n), "a tensor", where) for n in self._files.tolist()]
        self._number = np.min_scalar_type(len(self._names))

    def entry(self, key: str, found: Any) -> TensorEntry:
        """Make the entry of one tensor; everything is checked."""
        where = self._where
        shape, dtype = _sizes(found.size, key, where), getattr(found.properties, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{where}: {key} has no dtype")
        if math.prod(shape) >= TOO_MANY:
            raise CheckpointError(f"{where}: {key} has {len(shape)} dimensions and more elements than any tensor has")
        chunks = self._chunks(key, shape, found.chunks)
        if (chunks.boxes, shape) not in self._fitting:
            problem = chunks.boxes.cover_problem(shape)
            if problem is not None:
                raise CheckpointError(f"{where}: {key} of shape {shape} {problem}")
            self._fitting.add((chunks.boxes, shape))
        is_short = chunks.boxes.numel > chunks.lengths // dtype.itemsize
        if is_short.any():
            chunk = chunks[int(is_short.argmax())]
            raise CheckpointError(f"{where}: {key} has a chunk of {chunk.box.lengths} in {chunk.span.length} bytes")
        return TensorEntry(key, shape, dtype, chunks)

    def _chunks(self, key: str, shape: tuple[int, ...], found: Sequence[Any]) -> Chunks:
        rows, where = found[0] if len(found) == 1 else None, self._where
        if not isinstance(rows, Rows):
            boxes = [Box(_sizes(each.offsets, key, where), _sizes(each.sizes, key, where)) for each in found]
            if any(not len(box.offsets) == len(box.lengths) == len(shape) for box in boxes):
                raise CheckpointError(f"{where}: {key} of shape {shape} has a chunk of other dimensions")
            spans = [_span(self._storage, MetadataIndex(key, box.offsets), where) for box in boxes]
            return Chunks.of(len(shape), boxes, spans)
        if not rows.offsets.shape[1] == rows.lengths.shape[1] == len(shape):
            raise CheckpointError(f"{where}: {key} of shape {shape} has a chunk of other dimensions")
        places = self._storage.pop(key, None)  # each is held once
        if not isinstance(places, Rows) or places.start != rows.start:
            raise CheckpointError(f"{where}: {key} is listed but nothing says where its bytes are")
        numbers = [places.offsets, places.lengths, *([] if rows in self._shared else [rows.offsets, rows.lengths])]
        if any(found.min(initial=0) < 0 or found.max(initial=0) >= TOO_MANY for found in numbers):
            raise _no_lengths(key, where)
        if rows not in self._shared:
            self._shared[rows] = BoxIndex(rows.offsets, rows.lengths)
        files = np.searchsorted(self._files, places.files[:, 0]).astype(self._number)
        return Chunks(self._shared[rows], self._names, files, places.offsets[:, 0], places.lengths[:, 0])


def _sizes(value: Any, key: str, where: str) -> tuple[int, ...]:
    if are_lengths(value):
        return tuple(value)
    raise _no_lengths(key, where)


def _no_lengths(key: str, where: str) -> CheckpointError:
    return CheckpointError(f"{where}: {printable(key)} has something else where lengths should stand")


def _span(storage: Mapping[MetadataIndex, Any], index: MetadataIndex, where: str) -> Span:
    found = storage.get(index)
    if found is None and not any(index.offset or ()):
        found = storage.get(MetadataIndex(index.fqn))  # some writers leave out the offsets of whole tensors
    if found is None:
        raise CheckpointError(
            f"{where}: {index.fqn} is listed but nothing says where its bytes are (at {index.offset})"
        )
    name = _plain_name(getattr(found, "relative_path", None), index.fqn, where)
    numbers = (getattr(found, "offset", None), getattr(found, "length", None))
    offset, length = _sizes(numbers, index.fqn, where)
    if getattr(found, "transform_descriptors", None):
        raise CheckpointError(
            f"{where}: {index.fqn} went through a stream extension of torch's writer (such as zstd), which is not "
            "undone here; load the checkpoint with torch.distributed.checkpoint and save it without extensions"
        )
    return Span(name, offset, length)


def _plain_name(name: object, key: str, where: str) -> str:
    if not is_plain_name(name):
        shown = ascii(name)[:200] if isinstance(name, str) else type(name).__name__
        raise CheckpointError(f"{where}: {key} points to {shown}, which is not a file of the folder; refused")
    return str(name)


def _paths_of(metadata: object, where: str, budget: ReadingBudget) -> dict[str, tuple[str | int, ...]]:
    """Return the nesting of keys: paths of names and small numbers, which mean lists and whose lengths are counted."""
    told = getattr(metadata, "planner_data", None)
    found = told if isinstance(told, dict) else {}
    lengths: dict[tuple[Any, ...], int] = {}
    for key, path in found.items():
        is_path = isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH
        if not (is_path and all(type(n) is str or (type(n) is int and 0 <= n < _MAX_LIST_ITEMS) for n in path)):
            raise CheckpointError(f"{where} says of {key!a:.200} that it nests in something that is no path")
        for place, step in enumerate(path):
            if type(step) is int and step >= (known := lengths.get(path[:place], 0)):
                lengths[path[:place]] = step + 1
                budget.spend(ELEMENT_BYTES * (step + 1 - known))
    return found


def is_plain_name(name: object) -> bool:
    """Return True if it names a file of a folder, and nothing outside of it."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name or len(name.encode()) > _MAX_NAME_BYTES:
        return False
    return PurePosixPath(name).name == name and name not in ("", "..")


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


# ---- parts of a chunk, such as one layer of a stack ------------------------------------------------------------------


class _Window(io.RawIOBase):
    """Some consecutive bytes of an open file, as a file of their own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, origin + offset)
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(target)  # type: ignore[attr-defined]
        self._place += count
        return count


# ---- the folder ------------------------------------------------------------------------------------------------------


class CheckpointFolder:
    """A folder that torch.distributed.checkpoint (or Megatron's torch_dist) wrote.

    Opening it reads and checks only the metadata: names and shapes, chunks that cover each tensor once, files that
    exist and are long enough, a manifest with the same tensors and objects.

    Args:
        path: The folder with `.metadata` in it (an `iter_*` folder, not the one above).
        check: Whether all files have to be there and long enough, and the manifest, where there is one, to agree with
            the metadata; else what is wrong shows when it is read.

    Raises:
        CheckpointError: It is missing, not a checkpoint, incomplete or damaged; names what.
    """

    def __init__(self, path: str | Path, *, check: bool = True) -> None:
        self.path = Path(path)
        self._open_files: dict[str, io.BufferedReader] | None = None
        self._places: dict[ChunkEntry, int | None] = {}
        where = str(self.path / METADATA)
        try:
            if not self.path.is_dir():
                raise CheckpointError(f"{self.path} is not a folder; give the folder of one checkpoint")
            if not (self.path / METADATA).is_file():
                raise CheckpointError(
                    f"{self.path} has no {METADATA}, so it is not a (finished) checkpoint{_hint(self.path)}"
                )
            with open_file(self.path / METADATA, MAX_OBJECT_BYTES) as file:
                self.metadata: Metadata = load_metadata(file, where)
                budget = ReadingBudget(file.tell(), where)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{where} cannot be read: {_reason(error)}") from error
        with reading(where):
            self.tensors, self.objects = _entries_of(self.metadata, where)
            self.paths = _paths_of(self.metadata, where, budget)
            self.metadata.storage_data = None  # the entries have it
        if not check:
            return
        problems = [f"{name} {problem}" for name, problem in self.file_problems().items()]
        if problems:
            raise CheckpointError(
                f"{self.path} is incomplete: {'; '.join(problems[:8])}; restore the files, or use another checkpoint"
            )
        found = {} if self.manifest is None else self.differences(self.manifest)
        if found:
            first = ", ".join(printable(key) for key in list(found)[:4])
            raise CheckpointError(
                f"{self.path}: {METADATA} and {FILE_NAME} describe different checkpoints ({len(found)} entries differ, "
                f"such as {first}); `mfsdp checkpoint verify` lists them"
            )

    def __contains__(self, key: str) -> bool:
        return key in self.tensors or key in self.objects

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None if there is none, as in checkpoints of other programs."""
        return Manifest.read(self.path)

    def spans(self) -> Iterator[tuple[str, Span]]:
        """Yield every span of bytes, with the key it belongs to."""
        for key, tensor in self.tensors.items():
            yield from ((key, chunk.span) for chunk in tensor.chunks)
        yield from ((key, entry.span) for key, entry in self.objects.items())

    @cached_property
    def files(self) -> dict[str, int]:
        """The least bytes of each file, by name."""
        return {name: needed for name, (needed, _) in self._use_of_files.items()}

    @cached_property
    def _use_of_files(self) -> dict[str, tuple[int, int]]:
        """The least bytes of each file, and the sum of the spans in it, by name."""
        alike = defaultdict[int, list[Chunks]](list)  # tensors that share the names of files
        for entry in self.tensors.values():
            alike[id(entry.chunks.names)].append(entry.chunks)
        objects = [
            (entry.span.file, entry.span.offset + entry.span.length, entry.span.length)
            for entry in self.objects.values()
        ]
        rows: list[tuple[str, int, int]] = [*objects]
        for same in alike.values():
            ends, sums = np.zeros(len(same[0].names), np.int64), np.zeros(len(same[0].names))  # sums may be any
            for chunks in same:
                np.maximum.at(ends, chunks.files, chunks.offsets.astype(np.int64) + chunks.lengths)
                np.add.at(sums, chunks.files, chunks.lengths)
            rows += zip(same[0].names, ends.tolist(), map(int, sums.tolist()), strict=True)
        found: dict[str, tuple[int, int]] = {}
        for name, needed, told in rows:
            before = found.get(name, (0, 0))
            found[name] = max(before[0], needed), before[1] + told
        return found

    def file_problems(self) -> dict[str, str]:
        """Describe files that are missing or too short, by name."""
        found = {}
        for name, (needed, told) in sorted(self._use_of_files.items()):
            path = self.path / name
            try:
                has = path.stat().st_size if path.is_file() else None
            except (OSError, ValueError) as error:
                found[name] = f"cannot be read ({_reason(error)})"
                continue
            if has is None:
                found[name] = "is missing"
            elif has < needed:
                found[name] = f"is cut off: {has} bytes of at least {needed}"
            elif told > has * _MAX_SHARING:
                found[name] = f"has {has} bytes, and {told} in it are pointed to: the same ones again and again"
        return found

    def differences(self, sealed: Manifest) -> dict[str, str]:
        """Describe the differences between metadata and manifest, by key."""
        here = {key: f"{entry.shape} of {entry.dtype}" for key, entry in self.tensors.items()}
        there = {key: f"{seal.shape} of {seal.dtype}" for key, seal in sealed.tensors.items()}
        here |= dict.fromkeys(self.objects, "an object")
        there |= dict.fromkeys(sealed.objects, "an object")
        pairs = {key: (here.get(key, "nothing"), there.get(key, "nothing")) for key in here.keys() | there.keys()}
        return {
            key: f"is {own} in {METADATA} and {printable(other)} in {FILE_NAME}"
            for key, (own, other) in sorted(pairs.items())
            if own != other
        }

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def read_tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor; CheckpointError if there is none, or its bytes are damaged."""
        whole = whole_box(self._tensor(key).shape)
        return self.read_box(key, whole.offsets, whole.lengths)

    def read_box(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Read a box; only overlapping bytes are read, as one stretch per chunk if possible."""
        entry, wanted = self._tensor(key), Box(tuple(offsets), tuple(lengths))
        inside = len(wanted.offsets) == len(entry.shape) == len(wanted.lengths) and all(
            first >= 0 and length >= 0 and first + length <= total
            for first, length, total in zip(wanted.offsets, wanted.lengths, entry.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{key} of shape {entry.shape} has no box at {offsets} with lengths {lengths}")
        out: torch.Tensor | None = None
        for shared, values in self.parts(key, wanted):
            if shared == wanted:
                return values
            out = torch.empty(wanted.lengths, dtype=entry.dtype) if out is None else out
            out[shared.inside(wanted).indices] = values
            del values  # before the next one is read
        return torch.empty(wanted.lengths, dtype=entry.dtype) if out is None else out

    def parts(self, key: str, box: Box | None = None) -> Iterator[tuple[Box, torch.Tensor]]:
        """Read a tensor, or a box of it, one stored chunk at a time: their place in it, and the elements.

        Only overlapping bytes are read, and chunks without elements are left out.
        """
        entry = self._tensor(key)
        for number, shared in entry.chunks.boxes.meeting(whole_box(entry.shape) if box is None else box):
            yield shared, self._read_part(entry, number, shared)

    def _read_part(self, entry: TensorEntry, number: int, wanted: Box) -> torch.Tensor:
        """Read the elements of a box inside a chunk; for a part of it only the pages of the file that hold it."""
        chunk = entry.chunks[number]
        if wanted != chunk.box:
            with self._opened_chunk(entry, chunk) as (stream, where):
                if chunk not in self._places:
                    self._places[chunk] = place_of_elements(stream, chunk.box.lengths, entry.dtype, where)
                place = self._places[chunk]
                if place is not None:
                    shape = (*chunk.box.lengths, entry.dtype.itemsize)
                    raw = np.memmap(self.path / chunk.span.file, np.uint8, "r", chunk.span.offset + place, shape)
                    part = torch.from_numpy(np.array(raw[wanted.inside(chunk.box).indices]))
                    return part.view(entry.dtype).squeeze(-1)
        return self._read(entry, chunk)[wanted.inside(chunk.box).indices]

    def read_chunk(self, key: str, index: int, *, check: bool = False) -> torch.Tensor:
        """Read one chunk in its box's shape; `check` compares it with the CRC-32 in the file, if there is one."""
        entry = self._tensor(key)
        return self._read(entry, entry.chunks[index], check=check)

    def _tensor(self, key: str) -> TensorEntry:
        found = self.tensors.get(key)
        if found is None:
            raise CheckpointError(f"{self.path} has no tensor {key}; it has {len(self.tensors)} others")
        return found

    def _read(self, entry: TensorEntry, chunk: ChunkEntry, *, check: bool = False) -> torch.Tensor:
        with self._opened_chunk(entry, chunk) as (stream, where):
            values = load_tensor(stream, where, check=check)
        if tuple(values.shape) != chunk.box.lengths or values.dtype != entry.dtype:
            raise CheckpointError(
                f"{where} holds {tuple(values.shape)} of {values.dtype} where the metadata say {chunk.box.lengths} of "
                f"{entry.dtype}; the checkpoint is damaged"
            )
        return values

    def _opened_chunk(self, entry: TensorEntry, chunk: ChunkEntry) -> contextlib.AbstractContextManager[_Opened]:
        most = chunk.box.numel * entry.dtype.itemsize + _MAX_ARCHIVE_OVERHEAD
        return self.opened(chunk.span, f"{entry.key} at {chunk.box.offsets}", most)

    # ---- objects ----------------------------------------------------------------------------------------------------

    def read_bytes(self, key: str) -> bytes:
        """Read the bytes of an object, as `torch.save` wrote them."""
        entry = self.objects.get(key)
        if entry is None:
            raise CheckpointError(f"{self.path} has no object {key}; it has {len(self.objects)} others")
        with self.opened(entry.span, key) as (stream, where), reading(where):
            return stream.read()

    def read_object(self, key: str) -> object:
        """Read an object as data (see `archive.load_object`); CheckpointError if it is damaged or asks for code."""
        return load_object(self.read_bytes(key), f"{key} in {self.path / self.objects[key].span.file}")

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep files open inside the block from one span to the next; the most recent ones if there are many."""
        files: dict[str, io.BufferedReader] = {}
        self._open_files = files
        try:
            yield
        finally:
            self._open_files = None
            for file in files.values():
                file.close()

    @contextlib.contextmanager
    def opened(self, span: Span, what: str, at_most: int = MAX_OBJECT_BYTES) -> Iterator[_Opened]:
        """Open a span of one file, `at_most` so many bytes, as a file; also return its name for messages."""
        where = f"{what} in {self.path / span.file}"
        if span.length > at_most:
            raise CheckpointError(f"{where} has {span.length} bytes, and needs no more than {at_most}; refused")
        try:
            with self._file(span.file) as file:
                has = os.fstat(file.fileno()).st_size
                if has < span.offset + span.length:
                    raise CheckpointError(f"{where} is cut off: its file has {has} bytes")
                file.seek(span.offset)
                if span.length <= _AT_ONCE_BYTES:  # torch reads many small pieces, which take long from a window
                    yield io.BytesIO(file.read(span.length)), where
                else:
                    yield io.BufferedReader(_Window(file, span.offset, span.length)), where
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{where} cannot be read: {_reason(error)}") from error

    def _file(self, name: str) -> contextlib.AbstractContextManager[io.BufferedReader]:
        if self._open_files is None:
            return open_file(self.path / name)
        if name not in self._open_files:
            while len(self._open_files) >= _MOST_OPEN:
                self._open_files.pop(next(iter(self._open_files))).close()
            self._open_files[name] = open_file(self.path / name)
        return contextlib.nullcontext(self._open_files[name])


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _hint(folder: Path) -> str:
    inside = sorted(child.name for child in folder.iterdir() if (child / METADATA).is_file())
    if inside:
        return f"; it contains some: {', '.join(inside[-4:])}: give one of these"
    if any(folder.glob("*.safetensors")):
        return "; its .safetensors files are in Hugging Face's format: use load_hf"
    return ""
