"""All there is to know about a checkpoint without loading it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp.checkpoint.folder import CheckpointFolder, ObjectEntry, TensorEntry
from megatron_fsdp.checkpoint.tools.common_state import as_json, dtype_name, read_common
from megatron_fsdp.checkpoint.tools.kinds import COMMON_KEY, Kind, read_marker, recognise
from megatron_fsdp.checkpoint.tools.pieces import pieces
from megatron_fsdp.checkpoint.tools.statistics import TensorStatistics, statistics_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ListedEntry:
    """One key.

    Attributes:
        key: Its name.
        nbytes: Of the tensor's elements, or of the stored object.
        shape: Global; None for an object.
        dtype: Such as `bfloat16`; None for an object.
        chunks: How many boxes it is cut into; 1 for an object.
        files: Names of the files that hold it.
        statistics: None unless asked for, and for objects.
    """

    key: str
    nbytes: int
    shape: tuple[int, ...] | None
    dtype: str | None
    chunks: int
    files: tuple[str, ...]
    statistics: TensorStatistics | None = None


@dataclass(frozen=True)
class Inspection:
    """A checkpoint, described.

    Attributes:
        path: The folder.
        kind: Format, generation, layout of the optimizer.
        marker: What `metadata.json` says.
        common: The common state as plain data.
        entries: Keys in natural order; only those that the filter let through.
        hidden: How many the filter left out.
        files: Bytes of each file that keys lie in.
        mcore_data: True shapes of flattened tensors (generation G1).
        problems: What is wrong with it, one line each.
    """

    path: Path
    kind: Kind
    marker: dict[str, Any]
    common: dict[str, Any]
    entries: tuple[ListedEntry, ...]
    hidden: int
    files: dict[str, int]
    mcore_data: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def tensors(self) -> list[ListedEntry]:
        """Entries that are tensors."""
        return [entry for entry in self.entries if entry.shape is not None]

    def to_json(self) -> dict[str, Any]:
        """As `docs/schemas/inspect.schema.json` describes."""
        entries = []
        for entry in self.entries:
            told = asdict(entry)
            if entry.statistics is None:
                del told["statistics"]
            told["shape"] = None if entry.shape is None else list(entry.shape)
            told["files"] = list(entry.files)
            entries.append({"type": "object" if entry.shape is None else "tensor", **told})
        return {
            "schema_version": SCHEMA_VERSION,
            "path": str(self.path),
            **asdict(self.kind),
            "marker": as_json(self.marker),
            "common": self.common,
            "entries": entries,
            "hidden": self.hidden,
            "files": self.files,
            "mcore_data": self.mcore_data,
            "problems": list(self.problems),
        }


def inspect_folder(
    folder: CheckpointFolder, pattern: str | None = None, *, with_statistics: bool = False
) -> Inspection:
    """Describe an open checkpoint.

    Args:
        folder: Opened.
        pattern: Regular expression that keys must contain; None: all keys.
        with_statistics: Read all listed tensors, one chunk in memory at a time.

    Raises:
        CheckpointError: `metadata.json` or a tensor is damaged.
        ConfigurationError: The pattern is no regular expression.
    """
    wanted = compiled(pattern)
    kind, marker = recognise(folder), read_marker(folder.path)
    problems = _problems(folder, kind, marker)
    try:
        common = as_json(read_common(folder))
    except CheckpointError as error:
        common = {}
        problems.append(str(error))
    keys = natural_order([*folder.tensors, *folder.objects])
    kept = [key for key in keys if wanted.search(key)]
    entries = []
    for key in kept:
        if key in folder.objects:
            entries.append(_object_entry(folder.objects[key]))
        else:
            found = statistics_of(piece.values for piece in pieces(folder, key)) if with_statistics else None
            entries.append(_tensor_entry(folder.tensors[key], found))
    return Inspection(
        path=folder.path,
        kind=kind,
        marker=marker,
        common=common,
        entries=tuple(entries),
        hidden=len(keys) - len(kept),
        files={name: (folder.path / name).stat().st_size for name in sorted(folder.files)},
        mcore_data=as_json(getattr(folder.metadata, "mcore_data", None) or {}),
        problems=tuple(problems),
    )


def _problems(folder: CheckpointFolder, kind: Kind, marker: dict[str, Any]) -> list[str]:
    found = []
    if kind.format == "torch_dist" and not marker:
        found.append("metadata.json is missing: Megatron writes it last, so the save did not finish")
    if kind.format == "torch_dist" and kind.generation is None:
        found.append(f"there is no common state: neither common.pt nor {COMMON_KEY}")
    if not folder.tensors:
        found.append("it holds no tensors")
    return found


def _tensor_entry(entry: TensorEntry, statistics: TensorStatistics | None) -> ListedEntry:
    files = tuple(sorted({chunk.span.file for chunk in entry.chunks}))
    dtype = dtype_name(entry.dtype)
    return ListedEntry(entry.key, entry.nbytes, entry.shape, dtype, len(entry.chunks), files, statistics)


def _object_entry(entry: ObjectEntry) -> ListedEntry:
    return ListedEntry(entry.key, entry.span.length, None, None, 1, (entry.span.file,))


def compiled(pattern: str | None) -> re.Pattern[str]:
    """A regular expression of the user.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise ConfigurationError(f"{pattern!r} is not a regular expression ({error}); correct it") from error


def natural_order(keys: Iterable[str]) -> list[str]:
    """Sorted, with numbers inside by value: layers.2 before layers.10."""
    return sorted(keys, key=_natural)


def _natural(key: str) -> tuple[tuple[int, int | str], ...]:
    parts = re.split(r"(\d+)", key)
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in parts)
