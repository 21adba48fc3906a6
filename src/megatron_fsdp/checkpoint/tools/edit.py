"""Copies a checkpoint with keys removed or renamed and tensors in other dtypes."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megatron_fsdp.checkpoint.folder import METADATA, CheckpointFolder
from megatron_fsdp.checkpoint.manifest import FILE_NAME
from megatron_fsdp.checkpoint.new_folder import new_folder, require_apart
from megatron_fsdp.checkpoint.tools.inspect import whole
from megatron_fsdp.checkpoint.tools.repack import (
    KeyPath,
    ObjectSource,
    Source,
    TensorSource,
    nested_paths,
    path_conflict,
    write_folder,
)
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

_FORMS = '"remove REGEX", "rename REGEX REPLACEMENT", "cast REGEX DTYPE"'
_STALE = frozenset({METADATA, FILE_NAME, "integrity.json"})
"""Files that describe the old content."""
_SHOWN = 5


@dataclass(frozen=True)
class EditReport:
    """The result of an edit.

    Attributes:
        kept: Entries of the new checkpoint.
        removed: Keys that are gone.
        renamed: How many keys have changed.
        cast: How many tensors have another dtype.
        copied_files: Other files of the folder that were copied.
        dropped_files: Other files that were not, since they describe the old content.
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
    paths = edited_paths(nested_paths(folder), kept) if folder.metadata.planner_data else None
    others = sorted(path for path in folder.path.iterdir() if path.name not in {*folder.files, METADATA, FILE_NAME})
    copied = [path for path in others if _comes_along(path)]
    with new_folder(target) as temporary:
        write_folder(temporary, _sources(folder, kept), paths)
        for path in copied:
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
        dropped_files=tuple(path.name for path in others if path not in copied),
    )


def _comes_along(path: Path) -> bool:
    return not path.is_symlink() and path.name not in _STALE and path.suffix not in (".distcp", ".tmp")


def _sources(folder: CheckpointFolder, kept: Sequence[Kept]) -> Iterator[Source]:
    for entry in kept:
        if entry.dtype is None:
            yield ObjectSource(entry.key, partial(folder.read_bytes, entry.source))
            continue
        tensor = folder.tensors[entry.source]
        boxes = [chunk.box for chunk in tensor.chunks if chunk.box.numel] or [whole(tensor.shape)]
        yield TensorSource(entry.key, tensor.shape, entry.dtype, boxes, partial(_read, folder, entry))


def _read(folder: CheckpointFolder, entry: Kept, box: Box) -> torch.Tensor:
    return folder.read_box(entry.source, box.offsets, box.lengths).to(entry.dtype)


# ---- what happens to keys --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    r"""An operation on all keys that contain a match of a regular expression.

    Attributes:
        kind: `remove`, `rename` or `cast`.
        pattern: What to look for in keys.
        argument: The replacement (with `\1` or `\g<name>` for groups), or the name of a dtype.
        text: As the user gave it, for messages.
    """

    kind: str
    pattern: re.Pattern[str]
    argument: str
    text: str


@dataclass(frozen=True)
class Kept:
    """An entry that is kept.

    Attributes:
        source: Its key before.
        key: Its key after.
        dtype: After; None for an object.
    """

    source: str
    key: str
    dtype: torch.dtype | None


def parse_operation(text: str) -> Operation:
    r"""Read an operation: words divided by spaces; a word in quotes may hold spaces or be empty; `\` is kept as it is.

    Raises:
        ConfigurationError: It has another form.
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        kind, *rest = list(lexer)
    except ValueError as error:
        raise ConfigurationError(f"--op {text!r} cannot be read; give one of {_FORMS}") from error
    if kind not in ("remove", "rename", "cast") or len(rest) != (1 if kind == "remove" else 2):
        raise ConfigurationError(f"--op {text!r} is not an operation; give one of {_FORMS}")
    try:
        pattern = re.compile(rest[0])
    except re.error as error:
        raise ConfigurationError(f"--op {text!r}: {rest[0]!r} is not a regular expression ({error})") from error
    argument = rest[1] if len(rest) == 2 else ""
    if kind == "cast":
        _dtype_named(argument, text)
    return Operation(kind, pattern, argument, text)


def _dtype_named(name: str, text: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    with contextlib.suppress(RuntimeError, NotImplementedError):  # some dtypes are mere names
        if isinstance(found, torch.dtype):
            torch.zeros(1).to(found)
            return found
    raise ConfigurationError(f"--op {text!r}: {name!r} is no dtype of torch; give one such as float32 or bfloat16")


def plan_edit(dtypes: Mapping[str, torch.dtype | None], operations: Sequence[Operation]) -> list[Kept]:
    """Apply operations in their order, each to the result of the one before.

    Args:
        dtypes: Dtype of every key; None for an object.
        operations: At least one.

    Returns:
        The kept entries, in the order of `dtypes`.

    Raises:
        ConfigurationError: There is no operation, one matches nothing, keys would collide, or nothing would be left.
    """
    if not operations:
        raise ConfigurationError(f"there is nothing to do: give at least one --op of the forms {_FORMS}")
    kept = [Kept(key, key, dtype) for key, dtype in dtypes.items()]
    for operation in operations:
        kept = _apply(operation, kept)
        _require_distinct(kept, operation)
    if not kept:
        raise ConfigurationError("the operations remove every key; leave some")
    return kept


def _apply(operation: Operation, entries: Sequence[Kept]) -> list[Kept]:
    is_cast = operation.kind == "cast"
    matching = {
        entry.source
        for entry in entries
        if operation.pattern.search(entry.key) and not (is_cast and entry.dtype is None)
    }
    if not matching:
        what = "no tensor's key" if is_cast else "no key"
        raise ConfigurationError(
            f"--op {operation.text!r} matches {what}; it is applied after the operations before it, and `inspect "
            "--filter` shows what an expression matches"
        )
    if operation.kind == "remove":
        return [entry for entry in entries if entry.source not in matching]
    return [_changed(operation, entry) if entry.source in matching else entry for entry in entries]


def _changed(operation: Operation, entry: Kept) -> Kept:
    if operation.kind == "cast":
        return replace(entry, dtype=_dtype_named(operation.argument, operation.text))
    try:
        key = operation.pattern.sub(operation.argument, entry.key)
    except (re.error, IndexError) as error:
        raise ConfigurationError(f"--op {operation.text!r}: the replacement is wrong ({error})") from error
    if not key:
        raise ConfigurationError(f"--op {operation.text!r} leaves nothing of the key {entry.key}")
    return replace(entry, key=key)


def _require_distinct(entries: Sequence[Kept], operation: Operation) -> None:
    sources: dict[str, list[str]] = {}
    for entry in entries:
        sources.setdefault(entry.key, []).append(entry.source)
    twice = [f"{' and '.join(found)} as {key}" for key, found in sources.items() if len(found) > 1]
    if twice:
        more = f" and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
        raise ConfigurationError(f"--op {operation.text!r} would store {'; '.join(twice[:_SHOWN])}{more}")


def edited_paths(paths: Mapping[str, KeyPath], kept: Sequence[Kept]) -> dict[str, KeyPath]:
    """Make the paths in the nested state dict for the keys after an edit.

    Args:
        paths: Of the keys before.
        kept: As `plan_edit` gives it.

    Raises:
        ConfigurationError: A key would be both an entry and a group of entries.
    """
    found = {entry.key: edited_path(paths[entry.source], entry) for entry in kept}
    conflict = path_conflict(found)
    if conflict is not None:
        raise ConfigurationError(f"{conflict}; rename one of them differently")
    # Lists whose elements are no longer all numbered become dicts.
    has_text = {path[:depth] for path in found.values() for depth in range(len(path)) if isinstance(path[depth], str)}
    return {
        key: tuple(str(part) if path[:depth] in has_text else part for depth, part in enumerate(path))
        for key, path in found.items()
    }


def edited_path(path: KeyPath, entry: Kept) -> KeyPath:
    """Make the path of a renamed key: unchanged parts at both ends stay parts, the rest becomes one."""
    if entry.key == entry.source:
        return path
    rest = entry.key
    front: list[str | int] = []
    back: list[str | int] = []
    parts = list(path)
    while len(parts) > 1 and rest.startswith(f"{parts[0]}."):
        rest = rest[len(f"{parts[0]}.") :]
        front.append(parts.pop(0))
    while len(parts) > 1 and rest.endswith(f".{parts[-1]}"):
        rest = rest[: -len(f".{parts[-1]}")]
        back.insert(0, parts.pop())
    middle: str | int = int(rest) if len(parts) == 1 and isinstance(parts[0], int) and rest.isdecimal() else rest
    return (*front, middle, *back)
