"""Files beside the tensors that a checkpoint cannot do without: whether they are there, and as they were written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.safe_read import open_file
from megatron_fsdp.checkpoint.tools.kinds import COMMON_FILE, COMMON_KEY, MARKER, read_marker
from megatron_fsdp.checkpoint.tools.nesting import STRUCTURE_FILE, Structure
from megatron_fsdp.errors import CheckpointError

FILES_FACT = "files"
"""Under which of the manifest's facts the SHA-256 of side files stand, by name."""

_SHARDED_OBJECT = re.compile(r"/shard_[\d.]+_[\d.]+\Z")  # how torch_dist names objects
_NAME_LENGTH = 200
_BACKEND = "torch_dist"


@dataclass(frozen=True)
class SideFileProblem:
    """What is wrong with one file.

    Attributes:
        state: Whether it is there.
        name: Of the file.
        reason: In words.
    """

    state: Literal["missing", "damaged"]
    name: str
    reason: str


def noted_files(facts: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of side files, by name, as the facts of a manifest have them; what is no name or text is left out."""
    found = facts.get(FILES_FACT)
    if not isinstance(found, Mapping):
        return {}
    return {name: digest for name, digest in found.items() if _is_name(name) and isinstance(digest, str)}


def side_file_problems(folder: CheckpointFolder, facts: Mapping[str, Any]) -> list[SideFileProblem]:
    """What is missing or damaged beside the tensors.

    Args:
        folder: Opened; may lack any file but `.metadata`.
        facts: Of its manifest; empty where there is none.
    """
    noted = noted_files(facts)
    found = [problem for name, digest in noted.items() if (problem := _compared(folder, name, digest)) is not None]
    if STRUCTURE_FILE not in noted:
        try:
            Structure.read(folder.path)
        except CheckpointError as error:
            found.append(SideFileProblem("damaged", STRUCTURE_FILE, str(error)))
    return [*found, *_torch_dist_problems(folder)]


def _is_name(name: Any) -> bool:
    is_plain = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= _NAME_LENGTH
    return is_plain and name not in (".", "..") and not set(name) & set("/\\")


def _compared(folder: CheckpointFolder, name: str, digest: str) -> SideFileProblem | None:
    path = folder.path / name
    if not path.is_file():
        return SideFileProblem("missing", name, "it belongs to this checkpoint, by manifest.json")
    try:
        with open_file(path) as stream:
            same = hashlib.file_digest(stream, "sha256").hexdigest() == digest
    except OSError as error:
        return SideFileProblem("damaged", name, f"cannot be read: {error.strerror}")
    return None if same else SideFileProblem("damaged", name, "its bytes have changed since they were written")


def _torch_dist_problems(folder: CheckpointFolder) -> Iterator[SideFileProblem]:
    """What Megatron writes with every `torch_dist` checkpoint."""
    marker: Mapping[str, Any] = {}
    is_readable = True
    try:
        marker = read_marker(folder.path)
    except CheckpointError as error:
        is_readable = False
        yield SideFileProblem("damaged", MARKER, str(error))
    has_common = COMMON_KEY in folder.objects or (folder.path / COMMON_FILE).is_file()
    backend = marker.get("sharded_backend")
    if not (backend == _BACKEND or has_common or _looks_like_torch_dist(folder)):
        return
    if not (folder.path / MARKER).is_file():
        reason = "a torch_dist checkpoint has it, and it is written last: the save did not finish, or it was lost"
        yield SideFileProblem("missing", MARKER, reason)
    elif is_readable and backend != _BACKEND:
        said = ascii(backend)[:100]
        yield SideFileProblem("damaged", MARKER, f"says that the format is {said}, and this is {_BACKEND}")
    if not has_common:
        reason = f"iteration, arguments and parameter groups are neither there nor in {COMMON_KEY}"
        yield SideFileProblem("missing", COMMON_FILE, reason)


def _looks_like_torch_dist(folder: CheckpointFolder) -> bool:
    has_flattened = bool(getattr(folder.metadata, "mcore_data", None))
    return has_flattened or any(_SHARDED_OBJECT.search(key) for key in folder.objects)
