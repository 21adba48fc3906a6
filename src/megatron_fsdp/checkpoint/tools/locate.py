"""Which folder is meant: one checkpoint, or the root above several."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.checkpoint.folder import METADATA, CheckpointFolder
from megatron_fsdp.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d+)")
_RELEASE = "release"


@dataclass(frozen=True)
class ListedCheckpoint:
    """One folder below a root.

    Attributes:
        name: Of the folder.
        iteration: Its number; None for `release`.
        nbytes: Of all its files.
        is_latest: Whether the tracker file names it.
        is_finished: Whether it has a `.metadata`.
    """

    name: str
    iteration: int | None
    nbytes: int
    is_latest: bool
    is_finished: bool


def open_checkpoint(path: str | Path) -> CheckpointFolder:
    """Open a checkpoint, or the latest of a root.

    Raises:
        CheckpointError: There is none, or it is incomplete or damaged.
    """
    return CheckpointFolder(locate(path))


def locate(path: str | Path) -> Path:
    """The folder of one checkpoint: `path` itself, or what its tracker file names.

    Raises:
        CheckpointError: The tracker file is damaged or names a folder that is not there.
    """
    path = Path(path)
    if (path / METADATA).exists() or not (path / TRACKER).is_file():
        return path
    found = path / tracked(path)
    if not found.is_dir():
        raise CheckpointError(
            f"{path / TRACKER} names {found.name}, which is not there; give the folder of one checkpoint"
        )
    return found


def tracked(root: Path) -> str:
    """The name of the folder that the tracker file of a root stands for.

    Raises:
        CheckpointError: It holds neither a number nor `release`.
    """
    with (root / TRACKER).open("rb") as stream:
        text = stream.read(64).decode("ascii", "replace").strip()
    if text == _RELEASE:
        return _RELEASE
    if not text.isdecimal():
        raise CheckpointError(f"{root / TRACKER} holds {text!r} where a number or `release` should stand")
    return f"iter_{int(text):07d}"


def list_checkpoints(root: str | Path) -> list[ListedCheckpoint]:
    """The checkpoints of a root, oldest first, `release` before all.

    Raises:
        CheckpointError: It is not a folder, holds none, or its tracker file is damaged.
    """
    root = Path(root)
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a folder; give the folder that holds the iter_* folders")
    latest = tracked(root) if (root / TRACKER).is_file() else None
    found = []
    for child in root.iterdir():
        matched = _ITERATION.fullmatch(child.name)
        if child.is_dir() and (matched or child.name == _RELEASE):
            number = int(matched.group(1)) if matched else None
            nbytes = sum(file.stat().st_size for file in child.rglob("*") if file.is_file())
            finished = (child / METADATA).is_file()
            found.append(ListedCheckpoint(child.name, number, nbytes, child.name == latest, finished))
    if not found:
        raise CheckpointError(f"{root} holds no checkpoints (iter_* folders, or release)")
    return sorted(found, key=lambda item: -1 if item.iteration is None else item.iteration)
