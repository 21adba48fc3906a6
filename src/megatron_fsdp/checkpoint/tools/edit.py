"""A copy of a checkpoint with keys removed or renamed and tensors in other dtypes."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_fsdp.checkpoint.folder import METADATA, CheckpointFolder
from megatron_fsdp.checkpoint.tools.edit_plan import Kept, Operation, edited_paths, plan_edit
from megatron_fsdp.checkpoint.tools.kinds import MANIFEST
from megatron_fsdp.checkpoint.tools.nesting import STRUCTURE_FILE, nested_paths
from megatron_fsdp.checkpoint.new_folder import new_folder, require_apart
from megatron_fsdp.checkpoint.tools.pieces import whole
from megatron_fsdp.checkpoint.tools.stream_write import ObjectSource, TensorSource, write_folder
from megatron_fsdp.errors import CheckpointError

_STALE = frozenset({METADATA, MANIFEST, "integrity.json"})


@dataclass(frozen=True)
class EditReport:
    """What an edit did.

    Attributes:
        kept: Entries of the new checkpoint.
        removed: Keys that are gone.
        renamed: How many keys have changed.
        cast: How many tensors have another dtype.
        copied_files: Other files of the folder that came along.
        dropped_files: Other files that did not, since they describe the old content.
    """

    kept: tuple[Kept, ...]
    removed: tuple[str, ...]
    renamed: int
    cast: int
    copied_files: tuple[str, ...]
    dropped_files: tuple[str, ...]


def edit(folder: CheckpointFolder, target: Path, operations: Sequence[Operation]) -> EditReport:
    """Write an edited copy; one chunk is in memory at a time.

    Args:
        folder: The source, opened; it is only read.
        target: Absent or empty; it appears whole or not at all.
        operations: Applied in their order.

    Raises:
        CheckpointError: The source is damaged or cannot be edited, or the target is not empty, not writable
            or inside the source.
        ConfigurationError: As of `plan_edit` and `edited_paths`.
    """
    require_apart(target, folder.path)
    if getattr(folder.metadata, "mcore_data", None):
        raise CheckpointError(
            f"{folder.path} is of generation G1: its metadata describe flattened tensors by key, and edited keys would "
            "not fit them; convert it first"
        )
    dtypes: dict[str, torch.dtype | None] = {key: entry.dtype for key, entry in folder.tensors.items()}
    dtypes |= dict.fromkeys(folder.objects)
    kept = plan_edit(dtypes, operations)
    nested = nested_paths(folder)
    paths = None if nested is None else edited_paths(nested, kept)
    others = sorted(path for path in folder.path.iterdir() if path.name not in folder.files)
    has_same_keys = len(kept) == len(dtypes) and all(entry.key == entry.source for entry in kept)
    stale = _STALE if has_same_keys else _STALE | {STRUCTURE_FILE}
    copied = [path for path in others if _comes_along(path, stale)]
    with new_folder(target) as temporary:
        beside = {path.name: path.read_bytes() for path in copied if path.name == STRUCTURE_FILE}
        write_folder(temporary, _sources(folder, kept), paths, beside=beside)
        for path in copied:
            if path.name in beside:
                continue
            if path.is_dir():
                shutil.copytree(path, temporary / path.name, symlinks=True)
            else:
                shutil.copyfile(path, temporary / path.name)
    stayed = {entry.source for entry in kept}
    return EditReport(
        kept=tuple(kept),
        removed=tuple(key for key in dtypes if key not in stayed),
        renamed=sum(entry.key != entry.source for entry in kept),
        cast=sum(entry.dtype != dtypes[entry.source] for entry in kept),
        copied_files=tuple(path.name for path in copied),
        dropped_files=tuple(
            path.name for path in others if path not in copied and path.name not in (METADATA, MANIFEST)
        ),
    )


def _comes_along(path: Path, stale: Collection[str]) -> bool:
    return not path.is_symlink() and path.name not in stale and path.suffix not in (".distcp", ".tmp")


def _sources(folder: CheckpointFolder, kept: Sequence[Kept]) -> Iterator[TensorSource | ObjectSource]:
    for entry in kept:
        if entry.dtype is None:
            yield ObjectSource(entry.key, partial(folder.read_bytes, entry.source))
            continue
        tensor = folder.tensors[entry.source]
        numbers = [number for number, chunk in enumerate(tensor.chunks) if chunk.box.numel]
        boxes = [tensor.chunks[number].box for number in numbers]
        read = partial(_chunk, folder, entry, numbers)
        if not boxes:  # no elements
            boxes, read = [whole(tensor.shape)], partial(_nothing, tensor.shape, entry.dtype)
        yield TensorSource(entry.key, tensor.shape, entry.dtype, boxes, read)


def _chunk(folder: CheckpointFolder, entry: Kept, numbers: Sequence[int], place: int) -> torch.Tensor:
    return folder.read_chunk(entry.source, numbers[place]).to(entry.dtype)


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, _place: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
