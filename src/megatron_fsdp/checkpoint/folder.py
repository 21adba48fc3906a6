"""One checkpoint folder, open for reading by one process, on the CPU, without running code from it."""

from __future__ import annotations

import contextlib
import io
import math
import os
import secrets
from collections import Counter, defaultdict
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
from megatron_fsdp.checkpoint.safe_read import (
    ELEMENT_BYTES,
    MAX_DEPTH,
    MAX_OBJECT_BYTES,
    TOO_MANY,
    ReadingBudget,
    are_lengths,
    load_metadata,
    open_file,
    printable,
    read_file,
    reading,
)
from megatron_fsdp.errors import CheckpointError, has_control_characters
from megatron_fsdp.sharding.shards import Box

_MAX_NAME_BYTES = 255
_MAX_KEY_LENGTH = 4096
_MAX_LIST_ITEMS = 1 << 20  # torch makes a list as long as the largest index in a path
_PRIME = (1 << 61) - 1

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


@dataclass(frozen=True)
class TensorEntry:
    """One global tensor, and the chunks that cover it, each element once."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkEntry, ...]

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
    tensors, objects = {}, {}
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
            tensors[key] = _tensor_entry(key, found, storage, where)
        elif isinstance(found, BytesStorageMetadata):
            objects[key] = ObjectEntry(key, _span(storage, MetadataIndex(key), where))
        else:
            raise CheckpointError(f"{where}: {key} is neither a tensor nor an object but {type(found).__name__}")
    return tensors, objects


def _tensor_entry(
    key: str, found: TensorStorageMetadata, storage: Mapping[MetadataIndex, Any], where: str
) -> TensorEntry:
    shape, dtype = _sizes(found.size, key, where), getattr(found.properties, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: {key} has no dtype")
    chunks = []
    for chunk in found.chunks:
        box = Box(_sizes(chunk.offsets, key, where), _sizes(chunk.sizes, key, where))
        entry = ChunkEntry(box, _span(storage, MetadataIndex(key, box.offsets), where))
        if box.numel * dtype.itemsize > entry.span.length:
            raise CheckpointError(f"{where}: {key} has a chunk of {box.lengths} in {entry.span.length} bytes")
        chunks.append(entry)
    if math.prod(shape) >= TOO_MANY:
        raise CheckpointError(f"{where}: {key} has {len(shape)} dimensions and more elements than any tensor has")
    problem = cover_problem(shape, [chunk.box for chunk in chunks])
    if problem is not None:
        raise CheckpointError(f"{where}: {key} of shape {shape} {problem}")
    return TensorEntry(key, shape, dtype, tuple(chunks))


def _sizes(value: Any, key: str, where: str) -> tuple[int, ...]:
    if are_lengths(value):
        return tuple(value)
    raise CheckpointError(f"{where}: {printable(key)} has something else where lengths should stand")


def _span(storage: Mapping[MetadataIndex, Any], index: MetadataIndex, where: str) -> Span:
    found = storage.get(index)
    if found is None and not any(index.offset or ()):
        found = storage.get(MetadataIndex(index.fqn))  # some writers leave out the offsets of whole tensors
    if found is None:
        raise CheckpointError(
            f"{where}: {index.fqn} is listed but nothing says where its bytes are (at {index.offset})"
        )
    name = getattr(found, "relative_path", None)
    numbers = (getattr(found, "offset", None), getattr(found, "length", None))
    if not is_plain_name(name):
        shown = ascii(name)[:200] if isinstance(name, str) else type(name).__name__
        raise CheckpointError(f"{where}: {index.fqn} points to {shown}, which is not a file of the folder; refused")
    offset, length = _sizes(numbers, index.fqn, where)
    if getattr(found, "transform_descriptors", None):
        raise CheckpointError(
            f"{where}: {index.fqn} went through a stream extension of torch's writer (such as zstd), which is not "
            "undone here; load the checkpoint with torch.distributed.checkpoint and save it without extensions"
        )
    return Span(str(name), offset, length)


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


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Describe the fault of boxes that should hold each element of a tensor once; None if there is none."""
    for box in boxes:
        if len(box.offsets) != len(shape) or any(
            offset + length > total for offset, length, total in zip(box.offsets, box.lengths, shape, strict=True)
        ):
            return f"has a chunk outside of it, at {box.offsets} with lengths {box.lengths}"
    filled = [box for box in boxes if box.numel]
    total = sum(box.numel for box in filled)
    if total != math.prod(shape):
        state = "is incomplete" if total < math.prod(shape) else "has elements more than once"
        return f"{state}: its chunks hold {total} elements of {math.prod(shape)}"
    return None if _is_tiled(shape, filled) else "has elements more than once"


def _is_tiled(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return True if boxes inside a tensor hold each element once, in time linear in their number.

    Their volumes are added up, with every coordinate moved to a random place of its own: the sum is the volume of the
    whole tensor if each element is in one box, and otherwise with odds of (number of dimensions) / `_PRIME`.
    """
    places: dict[tuple[int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))  # of a coordinate along an axis

    def volume(offsets: Sequence[int], lengths: Sequence[int]) -> int:
        product = 1
        for dim, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
            product = product * (places[dim, first + length] - places[dim, first]) % _PRIME
        return product

    return sum(volume(box.offsets, box.lengths) for box in boxes) % _PRIME == volume([0] * len(shape), shape)


# ---- parts of a chunk, such as one layer of a stack ------------------------------------------------------------------


class BoxIndex:
    """The disjoint boxes of a tensor, indexed by place; there may be thousands of them."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._first = np.array([box.offsets for box in boxes], np.int64)
        self._end = self._first + np.array([box.lengths for box in boxes], np.int64)

    def meeting(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yield the boxes that overlap with one, each with the overlap in global coordinates."""
        if not wanted.numel:
            return
        first = np.array(wanted.offsets, np.int64)
        meets = (self._first < first + wanted.lengths) & (first < self._end)
        for number in np.flatnonzero(meets.all(-1)).tolist():
            shared = self._boxes[number].meet(wanted)
            if shared is not None:
                yield number, shared


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
        self._indices: dict[str, BoxIndex] = {}
        self._places: dict[ChunkEntry, int | None] = {}
        where = str(self.path / METADATA)
        try:
            if not self.path.is_dir():
                raise CheckpointError(f"{self.path} is not a folder; give the folder of one checkpoint")
            if not (self.path / METADATA).is_file():
                raise CheckpointError(
                    f"{self.path} has no {METADATA}, so it is not a (finished) checkpoint{_hint(self.path)}"
                )
            raw = read_file(self.path / METADATA)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{where} cannot be read: {_reason(error)}") from error
        self.metadata: Metadata = load_metadata(raw, where)
        with reading(where):
            self.tensors, self.objects = _entries_of(self.metadata, where)
            self.paths = _paths_of(self.metadata, where, ReadingBudget(len(raw), where))
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
        needed = Counter[str]()
        for _, span in self.spans():
            needed[span.file] = max(needed[span.file], span.offset + span.length)
        return needed

    def file_problems(self) -> dict[str, str]:
        """Describe files that are missing or too short, by name."""
        found = {}
        told = Counter[str]()
        for _, span in self.spans():
            told[span.file] += span.length
        for name, needed in sorted(self.files.items()):
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
            elif told[name] > has * _MAX_SHARING:
                found[name] = f"has {has} bytes, and {told[name]} in it are pointed to: the same ones again and again"
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
        if key not in self._indices:
            self._indices[key] = BoxIndex([chunk.box for chunk in entry.chunks])
        for number, shared in self._indices[key].meeting(whole_box(entry.shape) if box is None else box):
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
