"""Checkpoint folders to plain `torch.save` files and back, both ways bit-equal and in bounded memory."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pathlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.utils._pytree import tree_map

from megatron_fsdp.checkpoint.archive import load_object_file, write_archive
from megatron_fsdp.checkpoint.folder import CheckpointFolder, whole_box
from megatron_fsdp.checkpoint.hf.files import portions
from megatron_fsdp.checkpoint.inspect import COMMON_FILE
from megatron_fsdp.checkpoint.report import some_of
from megatron_fsdp.checkpoint.safe_read import Opaque, ReadingBudget, reading, shortened
from megatron_fsdp.checkpoint.save import KeyPath, TensorSource, write_state
from megatron_fsdp.checkpoint.store import new_file, new_folder
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

CHUNK_BYTES = 256 << 20

_SHOWN = 4
_AS_IT_IS = (type(None), bool, int, float, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
"""What `torch.load(weights_only=True)` accepts besides containers and tensors, but for subclasses."""


@dataclass(frozen=True)
class RepackReport:
    """How many tensors (of how many bytes) and other values were written, and what is not exactly as it was."""

    tensors: int
    nbytes: int
    objects: int
    notes: tuple[str, ...]


# ---- a folder to one file ----------------------------------------------------------------------------------------


def to_torch_save(folder: CheckpointFolder, target: Path) -> RepackReport:
    """Write the whole state dict of a checkpoint as one file that `torch.load(weights_only=True)` reads.

    Meanwhile the tensors lie in files beside `target`, as large as they are.
    """
    notes: list[str] = []
    with new_file(target) as temporary, tempfile.TemporaryDirectory(dir=target.absolute().parent) as beside:
        try:
            leaves = {key: _assembled(folder, key, Path(beside) / str(n)) for n, key in enumerate(folder.tensors)}
            leaves |= {key: plain(folder.read_object(key), key, notes) for key in folder.objects}
            with temporary.open("wb") as stream:
                write_archive(_nested(leaves, folder), stream)
                stream.flush()
                os.fsync(stream.fileno())
        except CheckpointError:
            raise
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{target} cannot be written ({error}); nothing of it is kept") from error
    if (folder.path / COMMON_FILE).is_file():
        notes.append(f"{COMMON_FILE} is not part of it: it is a file of torch.save already")
    nbytes = sum(entry.nbytes for entry in folder.tensors.values())
    return RepackReport(len(folder.tensors), nbytes, len(folder.objects), tuple(notes))


def _assembled(folder: CheckpointFolder, key: str, file: Path) -> Any:
    """Fill a whole tensor chunk by chunk, in a mapped file that the system pages in and out."""
    entry = folder.tensors[key]
    values = torch.empty(entry.shape, dtype=entry.dtype)
    if entry.numel:
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would be a signal later
            with file.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, entry.nbytes)
        mapped = torch.UntypedStorage.from_file(str(file), True, entry.nbytes)
        values = torch.empty(0, dtype=entry.dtype).set_(cast(torch.UntypedStorage, mapped)).view(entry.shape)
    for box, part in folder.parts(key):
        values[box.indices] = part
        del part  # before the next one is read
    return values


def _nested(leaves: Mapping[str, Any], folder: CheckpointFolder) -> dict[str, Any]:
    """Return the nested state dict again, in the order of the metadata; keys that are not nested are their own path."""
    paths: dict[str, KeyPath] = {key: folder.paths.get(key, (key,)) for key in folder.metadata.state_dict_metadata}
    counts = collections.Counter(paths.values())
    groups = {path[:depth] for path in paths.values() for depth in range(1, len(path))}
    conflict = next((key for key, path in paths.items() if path in groups or counts[path] > 1), None)
    told = f"{conflict} would be an entry, and also another one, or the group of others"
    if conflict is None:
        try:
            return unflatten_state_dict({key: leaves[key] for key in paths}, paths)
        except (TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
            told = f"they name both a list and a dict ({shortened(str(error))})"
    raise CheckpointError(f"the metadata contradict themselves about how keys nest: {told}")


# ---- one file to a folder ----------------------------------------------------------------------------------------


def from_torch_save(source: Path, target: Path, *, chunk_bytes: int = CHUNK_BYTES) -> RepackReport:
    """Write the state dict of a `torch.save` file as a checkpoint folder, with the keys that torch gives.

    The file is mapped, not read whole, and nothing in it is run. Tensors that share memory in the file are each written
    in full.

    Args:
        source: A dict, saved in the zip format that torch writes since 1.6.
        target: Absent or empty; it appears whole or not at all.
        chunk_bytes: Larger tensors are cut into chunks of at most this size, so that readers need not hold them whole.

    Raises:
        CheckpointError: The file is damaged, asks for code or holds no dict; the folder is not empty or not writable.
    """
    state = load_object_file(source)
    if not isinstance(state, dict):
        raise CheckpointError(f"{source} holds a {type(state).__name__}; only a state dict can become a checkpoint")
    leaves: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    budget = ReadingBudget(source.stat().st_size, str(source))

    def add(path: KeyPath, value: Any) -> None:
        budget.spend(sum(len(str(step)) for step in path))  # names above it may be long, and are repeated
        key = ".".join(map(str, path))
        if key in leaves:
            raise CheckpointError(f"{source}: two of its entries would be stored under {key}; rename one")
        leaves[key], paths[key] = value, path

    with reading(str(source)):
        traverse_state_dict(state, add)
    tensors = {key: value for key, value in leaves.items() if isinstance(value, torch.Tensor)}
    sharing: dict[int, list[str]] = {}
    for key, value in tensors.items():
        if value.numel():
            sharing.setdefault(value.untyped_storage().data_ptr(), []).append(key)
    tied = [keys for keys in sharing.values() if len(keys) > 1]
    notes = [f"{some_of(keys, _SHOWN)} share memory; each is written in full" for keys in tied]
    with new_folder(target) as temporary:
        sources = {key: _source(key, value, chunk_bytes, notes) for key, value in leaves.items()}
        write_state(sources, temporary, paths=paths, is_alone=True)
    nbytes = sum(value.nbytes for value in tensors.values())
    return RepackReport(len(tensors), nbytes, len(leaves) - len(tensors), tuple(notes))


def _source(key: str, value: Any, chunk_bytes: int, notes: list[str]) -> Any:
    """Return what is written: of a tensor its chunks, of an object one that can be pickled."""
    if isinstance(value, torch.Tensor):
        boxes = list(portions(whole_box(value.shape), value.dtype.itemsize, chunk_bytes))
        return TensorSource(tuple(value.shape), value.dtype, boxes, partial(_part, value))
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # noqa: BLE001  # stand-ins for classes of other packages; pickle raises anything
        return plain(value, key, notes)
    return value


def _part(values: torch.Tensor, box: Box) -> torch.Tensor:
    return values.detach()[box.indices].resolve_conj().resolve_neg().contiguous()


# ---- objects that torch's safe loader accepts ------------------------------------------------------------------------


def plain(value: Any, key: str, notes: list[str]) -> Any:
    """Turn an object into one of plain containers, numbers, text and tensors; note what changed."""

    def converted(value: Any) -> Any:
        if type(value) in _AS_IT_IS or isinstance(value, torch.Tensor | set | collections.Counter):
            return value  # NumPy's float64 is a float, and not the same
        found: Any = str(value) if isinstance(value, pathlib.PurePath) else repr(value)
        if isinstance(value, argparse.Namespace):
            found = tree_map(converted, vars(value))
        elif isinstance(value, frozenset):
            found = set(value)
        elif isinstance(value, np.generic):
            found = value.item()
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            found = torch.from_numpy(value.copy())
        kind = value.qualified_name if isinstance(value, Opaque) else type(value).__name__
        notes.append(f"{key}: {kind} became {type(found).__name__}")
        return found

    return tree_map(converted, value)
