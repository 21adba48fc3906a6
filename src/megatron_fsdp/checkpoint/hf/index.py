"""Which tensors a Hugging Face folder holds and where: read from headers and the index, all of it checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.checkpoint.folder import is_plain_name
from megatron_fsdp.checkpoint.hf.safetensors_format import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    StoredTensor,
    header_length,
    parse_header,
)
from megatron_fsdp.checkpoint.safe_read import open_file, read_json
from megatron_fsdp.errors import CheckpointError

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"

_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class WeightFiles:
    """What is stored in a folder.

    Attributes:
        folder: The folder.
        tensors: All tensors by key.
        sizes: Size in bytes of every file, by name.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    sizes: Mapping[str, int]

    def check_here(self, files: Iterable[str]) -> None:
        """Check that this process sees the files as they were when their headers were read.

        Raises:
            CheckpointError: A file is missing or has another size.
        """
        for file in sorted(set(files)):
            path = self.folder / file
            found = path.stat().st_size if path.is_file() else None
            if found != self.sizes[file]:
                seen = "is not there" if found is None else f"has {found} bytes"
                raise CheckpointError(
                    f"{path} {seen}, and had {self.sizes[file]} where its header was read; all ranks need it"
                )


def open_folder(folder: Path, single_file: str = MODEL_FILE, index_file: str | None = INDEX_FILE) -> WeightFiles:
    """Read what a folder holds; headers only, no tensor.

    Args:
        folder: Local.
        single_file: Name of the weights where they are one file; it goes before an index, as in transformers.
        index_file: Name of the index where they are several; None: there is never one.

    Raises:
        CheckpointError: The folder or a file is missing, or what they say does not fit the bytes or each other; names
            the file and the tensor.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the local folder that holds {single_file}")
    if (folder / single_file).is_file():
        tensors, nbytes = read_header(folder / single_file)
        return WeightFiles(folder, tensors, {single_file: nbytes})
    if index_file is None or not (folder / index_file).is_file():
        raise CheckpointError(_nothing_here(folder, single_file, index_file))
    return _open_indexed(folder, index_file)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of one file, and its size in bytes.

    Raises:
        CheckpointError: It cannot be read, or its header does not describe it.
    """
    try:
        with open_file(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            length = header_length(file.read(LENGTH_BYTES), nbytes, str(path))
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(header) != length:
        raise CheckpointError(f"{path} became shorter while it was read")
    return parse_header(header, path.name, nbytes, str(path)), nbytes


def _open_indexed(folder: Path, index_file: str) -> WeightFiles:
    weight_map = _read_weight_map(folder / index_file)
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    for file in sorted(set(weight_map.values())):
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {index_file} names it for {_first(weight_map, file)!r}")
        here, sizes[file] = read_header(path)
        for key in here:
            if weight_map.get(key) != file:
                said = f"says it is in {weight_map[key]}" if key in weight_map else "does not know it"
                raise CheckpointError(f"{path} holds tensor {key!r}, and {index_file} {said}; the folder is damaged")
        tensors.update(here)
    for key, file in weight_map.items():
        if key not in tensors:
            raise CheckpointError(f"{index_file} says that tensor {key!r} is in {folder / file}, and it is not")
    return WeightFiles(folder, tensors, sizes)


def _read_weight_map(path: Path) -> dict[str, str]:
    index = read_json(path, MAX_HEADER_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files; it is no index of safetensors files")
    for key, file in weight_map.items():
        if not (is_plain_name(file) and file.endswith(".safetensors") and ":" not in file):
            raise CheckpointError(
                f"{path} says that tensor {key!r} is in {file!r}; only a safetensors file of this folder may be named"
            )
    return weight_map


def _first(weight_map: Mapping[str, str], file: str) -> str:
    return next(key for key, value in weight_map.items() if value == file)


def _nothing_here(folder: Path, single_file: str, index_file: str | None) -> str:
    wanted = single_file if index_file is None else f"neither {single_file} nor {index_file}"
    if index_file is None:
        wanted = f"no {single_file}"
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
    seen = f"; it holds {', '.join(others[:4])}, rename it or give another folder" if others else ""
    return f"{folder} holds {wanted}{seen}"
