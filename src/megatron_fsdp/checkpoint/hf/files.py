"""The weight files of a Hugging Face folder: their tensors, boxes read from them, and new files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp.checkpoint.folder import is_plain_name
from megatron_fsdp.checkpoint.safe_read import read_json, shortened
from megatron_fsdp.checkpoint.store import FileOps
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.sharding.shards import Box

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"

PORTION_BYTES = 32 * 2**20
"""The most bytes that are read at once."""

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_PICKLES = ("*.bin", "*.pt", "*.pth")

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
"""Names in headers. Formats of less than a byte per element are not read."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file of the folder, as it is stored."""

    key: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder by key, and the bytes of every file by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    sizes: Mapping[str, int]

    def check_here(self) -> None:
        """Check that this process sees the files unchanged since their headers were read."""
        for file, size in sorted(self.sizes.items()):
            path = self.folder / file
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                seen = "is not there" if found is None else f"has {found} bytes"
                raise CheckpointError(f"{path} {seen}, and had {size} where its header was read; all ranks need it")


# ---- which tensors there are -----------------------------------------------------------------------------------------


def open_folder(folder: Path, single_file: str = MODEL_FILE, index_file: str | None = INDEX_FILE) -> WeightFiles:
    """Read the headers of a folder's files; a single file has priority over an index, as in transformers."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the local folder that holds {single_file}")
    if (folder / single_file).is_file():
        tensors, nbytes = read_header(folder / single_file)
        return WeightFiles(folder, tensors, {single_file: nbytes})
    if index_file is None or not (folder / index_file).is_file():
        raise CheckpointError(_nothing_here(folder, single_file, index_file))
    weight_map = _read_weight_map(folder / index_file)
    tensors, sizes = {}, {}
    for file in sorted(set(weight_map.values())):
        here, sizes[file] = read_header(folder / file)
        tensors |= here
    found = {key: tensor.file for key, tensor in tensors.items()}
    for key, _ in sorted(found.items() ^ weight_map.items()):
        raise CheckpointError(
            f"{folder / index_file} says that tensor {key!r} is in {weight_map.get(key, 'no file')}, and it is in "
            f"{found.get(key, 'none')}; the folder is damaged, copy it anew"
        )
    return WeightFiles(folder, tensors, sizes)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """Read the tensors of one file by key, and its size in bytes; the library checks the header against the bytes."""
    tensors = {}
    with _safe_open(path) as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            part = file.get_slice(key)
            dtype = str(part.get_dtype())
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"tensor {key!r} in {path} has dtype {dtype!r}, which is not read here; known are "
                    f"{', '.join(DTYPES)}"
                )
            tensors[key] = StoredTensor(key, path.name, DTYPES[dtype], tuple(part.get_shape()))
    return tensors, path.stat().st_size


def _safe_open(path: Path) -> Any:
    """Map a regular file into memory."""
    safetensors: Any = require("safetensors", "a Hugging Face folder")
    try:
        return safetensors.safe_open(path, "pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({shortened(str(error))}); it was cut off, is damaged or of another "
            "format, copy it anew"
        ) from error


def _read_weight_map(path: Path) -> dict[str, str]:
    index = read_json(path, _MAX_HEADER_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files; it is no index of safetensors files")
    for key, file in weight_map.items():
        if not (is_plain_name(file) and file.endswith(".safetensors") and ":" not in file):
            raise CheckpointError(
                f"{path} says that tensor {key!r} is in {file!r}; only a safetensors file of this folder may be named"
            )
        if not (path.parent / file).is_file():  # opening a pipe would block
            raise CheckpointError(f"{path.parent / file} is missing; {path.name} names it for {key!r}")
    return weight_map


def _nothing_here(folder: Path, single_file: str, index_file: str | None) -> str:
    wanted = f"no {single_file}" if index_file is None else f"neither {single_file} nor {index_file}"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds {wanted}, but {pickles[0]}: a pickle, which is not read here; save the model again by "
            "save_pretrained, which writes safetensors"
        )
    for name in filter(None, (single_file, index_file)):
        if os.path.lexists(folder / name):
            return f"{folder / name} is no file (but a folder, a pipe or a link to nothing); put the file itself there"
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    return f"{folder} holds {wanted}{f'; it holds {others[0]}, rename it or give another folder' if others else ''}"


# ---- boxes of them ---------------------------------------------------------------------------------------------------


def portions(box: Box, itemsize: int, limit: int | None = None) -> Iterator[Box]:
    """Cut a box into pieces of at most `limit` bytes (or one element) along its first dimensions, in order."""
    limit = PORTION_BYTES if limit is None else limit
    if box.numel * itemsize <= limit or box.numel <= 1:
        yield box
        return
    dim = next(index for index, length in enumerate(box.lengths) if length > 1)
    step = max(limit // (box.numel // box.lengths[dim] * itemsize), 1)
    for first in range(0, box.lengths[dim], step):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim] += first
        lengths[dim] = min(step, box.lengths[dim] - first)
        yield from portions(Box(tuple(offsets), tuple(lengths)), itemsize, limit)


class FolderReader:
    """Reads boxes of the tensors of a folder; keeps the file of the latest tensor mapped, and counts `bytes_read`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._name = ""
        self._file: Any = None

    def read(self, tensor: StoredTensor, box: Box) -> torch.Tensor:
        """Read one box as a read-only view of the mapped file; only its pages are touched."""
        if self._name != tensor.file:
            self._file, self._name = _safe_open(self.folder / tensor.file), tensor.file
        values: torch.Tensor = self._file.get_slice(tensor.key)[box.indices]
        if tuple(values.shape) != box.lengths or values.dtype != tensor.dtype:
            raise CheckpointError(f"{self.folder / tensor.file} has changed while it was read, at {tensor.key!r}")
        self.bytes_read += values.nbytes
        return values


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a new file from contiguous tensors on the CPU, and force it to the disk."""
    safetensors: Any = require("safetensors", "a Hugging Face folder")
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})  # without it transformers refuses the file
        FileOps().sync(path)  # that of another machine only that machine can
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {type(error).__name__}: {error}") from error
