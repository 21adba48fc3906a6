"""Checkpoint folders to plain `torch.save` files and back, both ways bit-equal and in bounded memory."""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import mmap
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from megatron_fsdp.checkpoint.archive import load_object_file, write_archive
from megatron_fsdp.checkpoint.folder import CheckpointFolder, whole_box
from megatron_fsdp.checkpoint.hf.files import portions
from megatron_fsdp.checkpoint.kinds import COMMON_FILE
from megatron_fsdp.checkpoint.naming import flatten
from megatron_fsdp.checkpoint.report import some_of
from megatron_fsdp.checkpoint.safe_read import Opaque, ReadingBudget, reading, shortened
from megatron_fsdp.checkpoint.save import KeyPath, ObjectSource, TensorSource, write_state
from megatron_fsdp.checkpoint.store import new_file, new_folder
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

CHUNK_BYTES = 256 << 20

_ALIGNMENT = 64
_SHOWN = 4
_AS_IT_IS = frozenset({type(None), bool, int, float, str, bytes, bytearray, torch.dtype, torch.device, torch.Size})
"""What `torch.load(weights_only=True)` accepts besides containers and tensors."""


@dataclass(frozen=True)
class RepackReport:
    """How many tensors (of how many bytes) and other values were written, and what is not exactly as it was."""

    tensors: int
    nbytes: int
    objects: int
    notes: tuple[str, ...]


# ---- a folder to one file ----------------------------------------------------------------------------------------


def to_torch_save(folder: CheckpointFolder, target: Path, *, tensors_only: bool = False) -> RepackReport:
    """Write the whole state dict of a checkpoint as one file that `torch.load(weights_only=True)` reads.

    Meanwhile the tensors lie in a temporary file beside `target`, as large as they are.
    """
    notes: list[str] = []
    with new_file(target) as temporary:
        try:
            leaves: dict[str, Any] = dict(_assembled(folder, target.absolute().parent))
            if not tensors_only:
                leaves |= {key: plain(folder.read_object(key), key, notes) for key in folder.objects}
            paths = {key: path for key, path in _nested_paths(folder).items() if key in leaves}
            with temporary.open("wb") as stream:
                write_archive(_nested(leaves, paths), stream)
                stream.flush()
                os.fsync(stream.fileno())
        except CheckpointError:
            raise
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{target} cannot be written ({error}); nothing of it is kept") from error
    if (folder.path / COMMON_FILE).is_file():
        notes.append(f"{COMMON_FILE} is not part of it: it is a file of torch.save already")
    tensors = folder.tensors.values()
    objects = 0 if tensors_only else len(folder.objects)
    return RepackReport(len(tensors), sum(entry.nbytes for entry in tensors), objects, tuple(notes))


def _assembled(folder: CheckpointFolder, place: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors, each filled chunk by chunk, in a nameless file that the system pages in and out."""
    sizes = [-(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT for entry in folder.tensors.values()]
    with tempfile.TemporaryFile(dir=place) as file:
        total = max(sum(sizes), 1)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, total)  # a full disk is an error here, and not a signal later
        else:
            file.truncate(total)
        memory = mmap.mmap(file.fileno(), total)
    for (key, entry), start in zip(folder.tensors.items(), itertools.accumulate(sizes, initial=0), strict=False):
        values = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.numel:
            raw = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=entry.nbytes)
            values = raw.view(entry.dtype).view(entry.shape)
        for box, part in folder.parts(key):
            values[box.indices] = part
            del part  # before the next one is read
        yield key, values


def _nested(leaves: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """Return the nested state dict again, in the order of the metadata."""
    conflict = _path_conflict(paths)
    try:
        if conflict is None:
            return unflatten_state_dict({key: leaves[key] for key in paths}, dict(paths))
    except (TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
        conflict = f"they name both a list and a dict ({shortened(str(error))})"
    raise CheckpointError(f"the metadata contradict themselves about how keys nest: {conflict}")


def _nested_paths(folder: CheckpointFolder) -> dict[str, KeyPath]:
    """Return the path of each key in the nested state dict; keys that are not nested are their own path."""
    found = folder.metadata.planner_data  # its paths were checked when the folder was opened
    told = found if isinstance(found, dict) else {}
    return {key: told.get(key, (key,)) for key in folder.metadata.state_dict_metadata}


def _path_conflict(paths: Mapping[str, KeyPath]) -> str | None:
    """Describe a key that would be two things: another entry too, or the group of others; None if none."""
    groups = {path[:depth]: key for key, path in paths.items() for depth in range(1, len(path))}
    entries: dict[KeyPath, str] = {}
    for key, path in paths.items():
        if path in groups:
            return f"{key} would be an entry, and also the group that holds {groups[path]}"
        if path in entries:
            return f"{key} and {entries[path]} would be one entry"
        entries[path] = key
    return None


# ---- one file to a folder ----------------------------------------------------------------------------------------


def from_torch_save(
    source: Path, target: Path, *, nesting: str = "torch", chunk_bytes: int = CHUNK_BYTES
) -> RepackReport:
    """Write the state dict of a `torch.save` file as a checkpoint folder for `torch.distributed.checkpoint.load`.

    The file is mapped, not read whole, and nothing in it is run. Tensors that share memory in the file are each written
    in full.

    Args:
        source: A dict, saved in the zip format that torch writes since 1.6.
        target: Absent or empty; it appears whole or not at all.
        nesting: `torch`: keys as torch.distributed.checkpoint.save gives them; `own`: as this library's own
            checkpoints have them, with lists, and dicts that have other keys than text, stored in one piece.
        chunk_bytes: Larger tensors are cut into chunks of at most this size, so that readers need not hold them whole.

    Raises:
        CheckpointError: The file is damaged, asks for code or holds no dict; the folder is not empty or not writable.
    """
    state = load_object_file(source)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} holds a {type(state).__name__}; only a state dict can become a checkpoint")
    with reading(str(source)):
        places = collections.Counter(_paths(state, ReadingBudget(source.stat().st_size)))
    twice = [path for path, count in places.items() if count > 1]  # 1 and "1" are one key
    if nesting == "torch" and twice:
        raise CheckpointError(f"{source}: two of its entries would be stored under {'.'.join(twice[0])}; rename one")
    leaves, paths = _flattened(state, str(source), nesting)
    tensors = {key: value for key, value in leaves.items() if isinstance(value, torch.Tensor)}
    notes = _tied(tensors)
    with new_folder(target) as temporary:
        sources = {key: _source(key, value, chunk_bytes, notes) for key, value in leaves.items()}
        write_state(sources, temporary, paths=paths, is_alone=True)
    nbytes = sum(value.nbytes for value in tensors.values())
    return RepackReport(len(tensors), nbytes, len(leaves) - len(tensors), tuple(notes))


def _paths(value: Any, budget: ReadingBudget, around: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where everything in dicts and lists is; each path is counted, with the names of all that is around it."""
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list) and any(isinstance(inner, torch.Tensor | Mapping | list) for inner in value):
        inside = list(enumerate(value))
    else:
        return
    budget.spend(sum(map(len, around)) * len(inside))
    for key, inner in inside:
        path = (*around, str(key))
        budget.spend(len(path[-1]))
        yield path
        yield from _paths(inner, budget, path)


def _flattened(state: Mapping[Any, Any], where: str, nesting: str) -> tuple[dict[str, Any], Mapping[str, KeyPath]]:
    """Leaves by flat key, and the path of each."""
    if nesting not in ("torch", "own"):
        raise ConfigurationError(f"nesting={nesting!r}: give 'torch' or 'own'")
    odd = [key for key in state if not isinstance(key, str)]
    if nesting == "own" and odd:
        raise CheckpointError(f"{where} has the key {odd[0]!r}, which is no text; use the nesting of torch")
    try:
        return flatten(state) if nesting == "own" else flatten_state_dict(dict(state))
    except (ValueError, ConfigurationError) as error:
        raise CheckpointError(
            f"{where}: two of its entries would be stored under one key ({error}); rename one"
        ) from error


def _source(key: str, value: Any, chunk_bytes: int, notes: list[str]) -> TensorSource | ObjectSource:
    if not isinstance(value, torch.Tensor):
        return ObjectSource(partial(_stored, value, key, notes))
    boxes = list(portions(whole_box(value.shape), value.dtype.itemsize, chunk_bytes))
    return TensorSource(tuple(value.shape), value.dtype, boxes, partial(_part, value))


def _part(values: torch.Tensor, box: Box) -> torch.Tensor:
    return values.detach()[box.indices].resolve_conj().resolve_neg().contiguous()


def _stored(value: Any, key: str, notes: list[str]) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception:  # noqa: BLE001  # stand-ins for classes of other packages; pickle raises anything
        stream = io.BytesIO()
        torch.save(plain(value, key, notes), stream)
    return stream.getvalue()


def _tied(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Which tensors share memory, in words."""
    sharing: dict[int, list[str]] = {}
    for key, value in tensors.items():
        if value.numel():
            sharing.setdefault(value.untyped_storage().data_ptr(), []).append(key)
    return [
        f"{some_of(keys, _SHOWN)} share memory; each is written in full" for keys in sharing.values() if len(keys) > 1
    ]


# ---- objects that torch's safe loader accepts ------------------------------------------------------------------------


def plain(value: Any, key: str, notes: list[str]) -> Any:
    """Turn an object into one of plain containers, numbers, text and tensors; copied where something changed."""
    if type(value) in _AS_IT_IS or isinstance(value, torch.Tensor):  # NumPy's float64 is a float, and not the same
        return value
    if isinstance(value, Mapping):
        changed = {plain(k, key, notes): plain(inner, shortened(f"{key}.{k}"), notes) for k, inner in value.items()}
        if isinstance(value, collections.OrderedDict | collections.Counter):
            return type(value)(changed)
        return changed
    if isinstance(value, list | tuple | set):
        return type(value)([plain(inner, shortened(f"{key}.{place}"), notes) for place, inner in enumerate(value)])
    return _converted(value, key, notes)


def _converted(value: Any, key: str, notes: list[str]) -> Any:
    before = type(value).__name__
    if isinstance(value, argparse.Namespace):
        found: Any = plain(vars(value), key, notes)
    elif isinstance(value, frozenset):
        found = {plain(inner, key, notes) for inner in value}
    elif isinstance(value, complex):
        found = torch.tensor(value, dtype=torch.complex128)
    elif isinstance(value, pathlib.PurePath):
        found = str(value)
    elif type(value).__module__ == "numpy":
        found = _from_numpy(value)
    else:
        before = value.qualified_name if isinstance(value, Opaque) else before
        found = repr(value)
    notes.append(f"{key}: {before} became {type(found).__name__}")
    return found


def _from_numpy(value: Any) -> Any:
    """Turn an array into a tensor, a number into a number; what torch has no dtype for into lists or text."""
    if not value.shape:
        return value.item()
    try:
        return torch.from_numpy(value.copy())
    except TypeError:
        return value.tolist()
