"""Checkpoint folders to plain `torch.save` files and back, both ways bit-equal and in bounded memory."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import flatten
from megatron_fsdp.checkpoint.safe_read import load_object_file
from megatron_fsdp.checkpoint.tools.kinds import COMMON_FILE
from megatron_fsdp.checkpoint.tools.nesting import KeyPath, Structure, flattened, nested_paths, unflattened
from megatron_fsdp.checkpoint.tools.new_folder import new_file, new_folder
from megatron_fsdp.checkpoint.tools.pieces import pieces
from megatron_fsdp.checkpoint.tools.plain_objects import plain
from megatron_fsdp.checkpoint.tools.stream_write import CHUNK_BYTES, ObjectSource, TensorSource, row_boxes, write_folder
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

MEMORY_BYTES = 256 << 20
"""State dicts up to this size are put together in memory, larger ones in a temporary file beside the result."""

_ALIGNMENT = 64
_SHOWN = 4


@dataclass(frozen=True)
class RepackReport:
    """What a conversion did.

    Attributes:
        tensors: How many tensors were written.
        nbytes: Bytes of their elements.
        objects: How many other values were written.
        notes: What is not exactly as it was, one line each.
    """

    tensors: int
    nbytes: int
    objects: int
    notes: tuple[str, ...]


# ---- a folder to one file ----------------------------------------------------------------------------------------


def to_torch_save(
    folder: CheckpointFolder, target: Path, *, tensors_only: bool = False, memory_bytes: int = MEMORY_BYTES
) -> RepackReport:
    """Write the whole state dict of a checkpoint as one file that `torch.load(weights_only=True)` reads.

    Args:
        folder: Opened.
        target: Must not exist; it appears whole or not at all.
        tensors_only: Leave out everything that is no tensor.
        memory_bytes: Above this size the state lies in a temporary file, as large as the tensors, beside `target`.

    Raises:
        CheckpointError: The checkpoint is damaged, or the file exists or cannot be written.
    """
    notes: list[str] = []
    with new_file(target) as temporary:
        leaves: dict[str, Any] = {}
        try:
            leaves.update(_assembled(folder, memory_bytes, target.absolute().parent))
            if not tensors_only:
                leaves.update({key: plain(folder.read_object(key), key, notes) for key in folder.objects})
            in_order = {key: leaves[key] for key in folder.metadata.state_dict_metadata if key in leaves}
            state = unflattened(in_order, nested_paths(folder), Structure.read(folder.path))
            with temporary.open("wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
        except (OSError, RuntimeError) as error:
            raise _as_checkpoint_error(error, f"{target} cannot be written") from error
    if (folder.path / COMMON_FILE).is_file():
        notes.append(f"{COMMON_FILE} is not part of it: it is a file of torch.save already")
    tensors = folder.tensors.values()
    objects = 0 if tensors_only else len(folder.objects)
    return RepackReport(len(tensors), sum(entry.nbytes for entry in tensors), objects, tuple(notes))


def _assembled(folder: CheckpointFolder, memory_bytes: int, place: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in one stretch of memory (or of a file), each filled chunk by chunk."""
    starts, total = {}, 0
    for key, entry in folder.tensors.items():
        starts[key] = total
        total += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = _stretch(total, memory_bytes, place)
    for key, entry in folder.tensors.items():
        if entry.numel == 0:
            yield key, torch.empty(entry.shape, dtype=entry.dtype)
            continue
        raw = torch.frombuffer(memory, dtype=torch.uint8, offset=starts[key], count=entry.nbytes)
        values = raw.view(entry.dtype).view(entry.shape)
        for piece in pieces(folder, key):
            values[piece.box.indices] = piece.values
        yield key, values


def _stretch(total: int, memory_bytes: int, place: Path) -> mmap.mmap:
    """Memory that the system may move to a file on disk where it is large; the file has no name."""
    if total <= memory_bytes:
        return mmap.mmap(-1, max(total, 1))
    with tempfile.TemporaryFile(dir=place) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, total)  # a full disk is an error here, and not a signal later
        else:
            file.truncate(total)
        return mmap.mmap(file.fileno(), total)


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
        chunk_bytes: Larger tensors are cut into chunks of rows of about this size.

    Raises:
        CheckpointError: The file is damaged, asks for code or holds no dict; the folder is not empty or not writable.
    """
    state = load_object_file(source)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} holds a {type(state).__name__}; only a state dict can become a checkpoint")
    leaves, paths, structure, notes = _flattened(state, str(source), nesting)
    tensors = {key: value for key, value in leaves.items() if isinstance(value, torch.Tensor)}
    notes += _tied(tensors)
    with new_folder(target) as temporary:
        write_folder(temporary, _sources(leaves, chunk_bytes, notes), paths, beside=structure.files())
    nbytes = sum(value.nbytes for value in tensors.values())
    return RepackReport(len(tensors), nbytes, len(leaves) - len(tensors), tuple(notes))


def _flattened(
    state: Mapping[Any, Any], where: str, nesting: str
) -> tuple[dict[str, Any], Mapping[str, KeyPath], Structure, list[str]]:
    if nesting == "torch":
        return flattened(state, where)
    if nesting != "own":
        raise ConfigurationError(f"nesting={nesting!r}: give 'torch' or 'own'")
    odd = [key for key in state if not isinstance(key, str)]
    if odd:
        raise CheckpointError(f"{where} has the key {odd[0]!r}, which is no text; use the nesting of torch")
    leaves, paths = flatten(state)
    return leaves, dict(paths), Structure(), []


def _sources(leaves: Mapping[str, Any], chunk_bytes: int, notes: list[str]) -> Iterator[TensorSource | ObjectSource]:
    for key, value in leaves.items():
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            boxes = row_boxes(shape, value.dtype, chunk_bytes)
            yield TensorSource(key, shape, value.dtype, boxes, partial(_rows, value, boxes))
        else:
            yield ObjectSource(key, partial(_stored, value, key, notes))


def _rows(values: torch.Tensor, boxes: Sequence[Box], number: int) -> torch.Tensor:
    part = values.detach()[boxes[number].indices]
    return part.resolve_conj().resolve_neg().contiguous()


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
    return [f"{_some(keys)} share memory; each is written in full" for keys in sharing.values() if len(keys) > 1]


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _as_checkpoint_error(error: Exception, what: str) -> CheckpointError:
    return error if isinstance(error, CheckpointError) else CheckpointError(f"{what} ({error}); nothing of it is kept")
