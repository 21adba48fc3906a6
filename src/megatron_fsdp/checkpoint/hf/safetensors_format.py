"""The header of a safetensors file: parsed with every claim checked, and written. Pure.

8 bytes      length of the header, little endian
header       JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [start, stop]}, ...}
data         the tensors, row-major, one after another without holes; offsets count from here
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp.checkpoint.safe_read import MAX_DIMS
from megatron_fsdp.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""

_METADATA = "__metadata__"
_TOO_MANY = 1 << 62
_ALIGNMENT = 8

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names in the header. Formats of less than a byte per element are not read."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        key: Its name in the file.
        file: Name of the file, inside of the folder.
        dtype: As stored.
        shape: As stored; row-major.
        start: First byte, counted from the beginning of the file.
    """

    key: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def header_length(first: bytes, file_bytes: int, where: str) -> int:
    """Length of the header, from the first 8 bytes of a file.

    Args:
        first: The first `LENGTH_BYTES` bytes.
        file_bytes: Size of the file.
        where: Names the file.

    Raises:
        CheckpointError: The file is too short, or the length is impossible.
    """
    if len(first) < LENGTH_BYTES:
        raise CheckpointError(f"{where} has {file_bytes} bytes and is no safetensors file; it may be cut off")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} announces a header of {length} bytes, and {MAX_HEADER_BYTES} is the most that safetensors "
            "allows; it is damaged or no safetensors file"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{where} has {file_bytes} bytes, fewer than its header of {length} bytes needs; it was cut off"
        )
    return length


def parse_header(header: bytes, file: str, file_bytes: int, where: str) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Args:
        header: The JSON, without the length before it.
        file: Name of the file.
        file_bytes: Its size.
        where: Names the file in messages.

    Returns:
        By key, in the order of the header.

    Raises:
        CheckpointError: The header is no JSON of the right form, or does not describe the bytes of the file exactly;
            names the tensor.
    """
    try:
        described = json.loads(header.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {where} is no JSON as safetensors has it: {error}") from error
    if not isinstance(described, dict):
        raise CheckpointError(f"the header of {where} is a JSON {type(described).__name__}, not an object")
    _check_metadata(described.pop(_METADATA, {}), where)
    data_start = LENGTH_BYTES + len(header)
    for key in described:
        if any("\ud800" <= character <= "\udfff" for character in key):
            raise CheckpointError(f"{where} names a tensor {key!r}, which is no text; the header is damaged")
    found = {key: _tensor(key, entry, file, data_start, where) for key, entry in described.items()}
    _check_cover(list(found.values()), data_start, file_bytes, where)
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands in it twice")
        found[key] = value
    return found


def _check_metadata(metadata: object, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{_METADATA} in the header of {where} is not an object of texts; the file is damaged")


def _tensor(key: str, entry: object, file: str, data_start: int, where: str) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {key!r} in {where} is not described by dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"tensor {key!r} in {where} has shape {shape!r} and data_offsets {offsets!r}")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"tensor {key!r} in {where} has dtype {entry['dtype']!r}, which is not read here; known are "
            f"{', '.join(DTYPES)}"
        )
    made = StoredTensor(key, file, dtype, tuple(shape), data_start + offsets[0])
    if made.nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"tensor {key!r} in {where} of shape {made.shape} and dtype {entry['dtype']} needs {made.nbytes} bytes, "
            f"but data_offsets {offsets} give it {offsets[1] - offsets[0]}"
        )
    return made


def _are_counts(values: object) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    return all(type(value) is int and 0 <= value < _TOO_MANY for value in values)


def _check_cover(tensors: Sequence[StoredTensor], data_start: int, file_bytes: int, where: str) -> None:
    ordered = sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes))
    for tensor in ordered:
        if tensor.start + tensor.nbytes > file_bytes:
            raise CheckpointError(
                f"tensor {tensor.key!r} ends at byte {tensor.start + tensor.nbytes} of {where}, which has only "
                f"{file_bytes}; the file was cut off or is damaged"
            )
    ends = [data_start, *(tensor.start + tensor.nbytes for tensor in ordered)]
    for end, tensor in zip(ends, ordered, strict=False):
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "begins behind a hole"
            raise CheckpointError(f"tensor {tensor.key!r} in {where} {what}; the header is damaged")
    if ends[-1] != file_bytes:
        raise CheckpointError(f"{where} has {file_bytes - ends[-1]} bytes behind its last tensor; it is damaged")


@dataclass(frozen=True)
class FileLayout:
    """A file as it will be written.

    Attributes:
        name: Of the file.
        head: Everything before the data.
        tensors: In the order of the data.
        nbytes: Size of the file.
    """

    name: str
    head: bytes
    tensors: tuple[StoredTensor, ...]
    nbytes: int


def lay_out_file(
    name: str, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> FileLayout:
    """Place tensors in a file: those of the widest elements first, so that every tensor is aligned.

    Args:
        name: Of the file.
        tensors: Key, dtype and shape of each.
        metadata: Texts for the header.

    Raises:
        CheckpointError: safetensors has no name for a dtype, or the header would be too long.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in ordered]
    starts = list(itertools.accumulate(sizes, initial=0))
    described: dict[str, Any] = {_METADATA: dict(metadata)}
    for (key, dtype, shape), start, size in zip(ordered, starts, sizes, strict=False):
        if dtype not in _NAMES:
            raise CheckpointError(f"{key} has dtype {dtype}, which safetensors cannot hold; give another dtype")
        described[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
    header = json.dumps(described, separators=(",", ":")).encode("utf-8")
    header += b" " * (-len(header) % _ALIGNMENT)
    if len(header) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{name} would have a header of {len(header)} bytes; give a smaller max_shard_bytes")
    first = LENGTH_BYTES + len(header)
    placed = tuple(
        StoredTensor(key, name, dtype, tuple(shape), first + start)
        for (key, dtype, shape), start in zip(ordered, starts, strict=False)
    )
    return FileLayout(name, len(header).to_bytes(LENGTH_BYTES, "little") + header, placed, first + starts[-1])
