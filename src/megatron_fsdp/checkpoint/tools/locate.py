"""Resolves a path: one checkpoint, or the folder of a run above several."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.store import POINTER, RELEASE, RunFolder, is_whole, iteration_of


class ListedCheckpoint(NamedTuple):
    """One folder of a run: its name, iteration (None for `release`), bytes of its files, and its state.

    `is_latest` says that loading the latest one loads it, `is_whole` that it was finished.
    """

    name: str
    iteration: int | None
    nbytes: int
    is_latest: bool
    is_whole: bool


def open_checkpoint(path: str | Path) -> CheckpointFolder:
    """Open a checkpoint, or the latest of a run.

    Raises:
        CheckpointError: There is none, or it is incomplete or damaged.
    """
    return CheckpointFolder(locate(path))


def locate(path: str | Path) -> Path:
    """Return the folder of one checkpoint: `path` itself, or the latest one in the folder of a run.

    Raises:
        CheckpointError: The pointer of the run is damaged or names what is not there.
    """
    path = Path(path)
    run = RunFolder(path)
    if is_whole(path) or not path.is_dir() or not ((path / POINTER).exists() or run.iterations()):
        return path
    return run.resolve()


def list_checkpoints(root: str | Path) -> list[ListedCheckpoint]:
    """List the checkpoints of a run, oldest first, `release` before all; unfinished ones too.

    Args:
        root: Any path; what is not the folder of a run has none.

    Raises:
        CheckpointError: The pointer to the latest is damaged.
    """
    root = Path(root)
    if is_whole(root) or not root.is_dir():
        return []
    run = RunFolder(root)
    children = [path for path in root.iterdir() if path.name == RELEASE or iteration_of(path.name) is not None]
    latest = run.latest() if (root / POINTER).exists() or run.iterations() else None
    found = [
        ListedCheckpoint(path.name, iteration_of(path.name), _nbytes(path), path == latest, is_whole(path))
        for path in children
    ]
    return sorted(found, key=lambda item: -1 if item.iteration is None else item.iteration)


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
