"""Read part of a chunk without the rest of it: a chunk may be a stack of layers, and what is wanted one of them."""

from __future__ import annotations

import io
import math
import pickle
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron_fsdp.checkpoint.archive import place_of_contents
from megatron_fsdp.checkpoint.folder import CheckpointFolder, ChunkEntry, TensorEntry
from megatron_fsdp.checkpoint.restricted_pickle import RestrictedUnpickler, plain_names
from megatron_fsdp.errors import CheckpointError
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


_MAX_PICKLE_BYTES = 1 << 20


class SparingReader:
    """Reads boxes as `CheckpointFolder.read_box` does, holding hardly more than the box.

    Args:
        folder: Open.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._indices: dict[str, ChunkIndex] = {}

    def read_box(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A box of a tensor.

        Args:
            key: Of the tensor.
            offsets: First index along each dimension.
            lengths: Along each dimension.

        Raises:
            CheckpointError: As of `CheckpointFolder.read_box`.
        """
        entry = self._folder.tensors.get(key)
        if entry is None or not _is_inside(entry, offsets, lengths):
            return self._folder.read_box(key, offsets, lengths)  # says what is wrong
        result: Tensor | None = None
        for index, shared in self._index_of(entry).meeting(offsets, lengths):
            values = self._read_part(entry, index, shared)
            if shared.lengths == tuple(lengths):
                return values
            result = torch.empty(tuple(lengths), dtype=entry.dtype) if result is None else result
            _part(result, [a - b for a, b in zip(shared.offsets, offsets, strict=True)], shared.lengths).copy_(values)
            del values
        return torch.empty(tuple(lengths), dtype=entry.dtype) if result is None else result

    def _index_of(self, entry: TensorEntry) -> ChunkIndex:
        if entry.key not in self._indices:
            self._indices[entry.key] = ChunkIndex([chunk.box for chunk in entry.chunks])
        return self._indices[entry.key]

    def _read_part(self, entry: TensorEntry, index: int, wanted: Box) -> Tensor:
        """The elements of a box inside a chunk."""
        chunk = entry.chunks[index]
        inside = wanted.inside(chunk.box)
        stretch = None
        if wanted.lengths != chunk.box.lengths and not chunk.transforms:
            stretch = _stretch_of(chunk.box.lengths, inside)
        if stretch is not None:
            found = _read_stretch(self._folder.path / chunk.span.file, entry, chunk, *stretch)
            if found is not None:
                return found.reshape(wanted.lengths)
        return _part(self._folder.read_chunk(entry.key, index), inside.offsets, inside.lengths)


def _stretch_of(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """First element and number of elements, where a box is one stretch of the flattened tensor."""
    partial = max((axis for axis, n in enumerate(box.lengths) if n != shape[axis]), default=0)
    if any(length != 1 for length in box.lengths[:partial]):
        return None
    start = 0
    for at, length in zip(box.offsets, shape, strict=True):
        start = start * length + at
    return start, box.numel


def _read_stretch(path: Path, entry: TensorEntry, chunk: ChunkEntry, start: int, numel: int) -> Tensor | None:
    """Elements of a chunk, in order; None where the archive is not as simple as that."""
    size, where = entry.dtype.itemsize, f"{entry.key} in {path}"
    try:
        with path.open("rb") as file:
            data = _place_of_data(
                _Window(file, chunk.span.offset, chunk.span.length), entry.dtype, chunk.box.lengths, where
            )
            if data is None:
                return None
            raw = bytearray(numel * size)
            file.seek(chunk.span.offset + data + start * size)
            if file.readinto(raw) != len(raw):
                raise CheckpointError(f"{where} is cut off")
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except Exception:  # noqa: BLE001  # damaged bytes raise anything; the reader of whole chunks says what is wrong
        return None
    return torch.frombuffer(raw, dtype=entry.dtype) if numel else torch.empty(0, dtype=entry.dtype)


def _place_of_data(window: _Window, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> int | None:
    """Where the elements begin in the archive, if they are all there, in order and as they are in memory."""
    with zipfile.ZipFile(window) as archive:
        by_name = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        described, data = by_name.get("data.pkl"), by_name.get("data/0")
        if described is None or data is None or described.file_size > _MAX_PICKLE_BYTES:
            return None
        order = by_name.get("byteorder")
        if order is not None and archive.read(order).decode() != sys.byteorder:
            return None
        geometry = _GeometryUnpickler(archive.read(described), where).load()
    whole = _Geometry("0", dtype, 0, shape)
    plain = data.compress_type == zipfile.ZIP_STORED and data.file_size == math.prod(shape) * dtype.itemsize
    if not plain or geometry != whole:
        return None

    def read(offset: int, count: int) -> bytes:
        window.seek(offset)
        return window.read(count)

    return place_of_contents(data, read)


class _Geometry:
    """How one tensor lies in its storage, compared by value; `shape` is None unless elements are in order."""

    def __init__(self, key: str, dtype: torch.dtype, start: int, shape: tuple[int, ...] | None) -> None:
        self.value = (key, dtype, start, shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Geometry) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Classes that pickles of tensors name; tensors of other dtypes are read whole."""


class _GeometryUnpickler(RestrictedUnpickler):
    """Reads how a tensor lies in its storage, and builds no tensor."""

    def __init__(self, raw: bytes, where: str) -> None:
        super().__init__(io.BytesIO(raw))
        self.names = plain_names() | {("torch._utils", "_rebuild_tensor_v2"): _geometry}
        self.where = where

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """As above; a class of storages stands for its dtype."""
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        try:
            return super().find_class(module_name, global_name)
        except CheckpointError as error:
            raise pickle.UnpicklingError(str(error)) from error

    def persistent_load(self, pid: Any, /) -> tuple[str, Any]:
        """A storage: its key and dtype."""
        _, dtype, key, *_ = pid
        return key, dtype


def _geometry(
    storage: tuple[str, Any], start: int, size: Sequence[int], stride: Sequence[int], *_: object
) -> _Geometry:
    key, dtype = storage
    in_order, step = True, 1
    for length, found in zip(reversed(size), reversed(stride), strict=True):
        in_order = in_order and (length == 1 or found == step)
        step *= length
    return _Geometry(key, dtype, start, tuple(size) if in_order else None)


class _Window(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self.length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        raw = self._file.read(max(0, min(len(buffer), self.length - self._at)))
        buffer[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)


def _is_inside(entry: TensorEntry, offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    return len(offsets) == len(lengths) == len(entry.shape) and all(
        first >= 0 and length >= 0 and first + length <= size
        for first, length, size in zip(offsets, lengths, entry.shape, strict=True)
    )


def _part(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for axis, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor
