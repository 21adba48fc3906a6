"""Folders and files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fsdp.checkpoint.publish import FileOps
from megatron_fsdp.errors import CheckpointError


def require_apart(target: Path, source: Path | None = None) -> None:
    """Refuse a folder that cannot be made without harm to what is in use.

    Args:
        target: To be made.
        source: What is read meanwhile; None: nothing that could be hurt.

    Raises:
        CheckpointError: The target is the current folder, the source, or inside the source.
    """
    wanted = Path(os.path.realpath(target))
    if source is not None:
        origin = Path(os.path.realpath(source))
        if wanted == origin or origin in wanted.parents:
            where = "the checkpoint that is read" if wanted == origin else f"inside {source}, which is read"
            raise CheckpointError(f"{target} is {where}; give a folder outside of it")
    if wanted == Path(os.path.realpath(".")):
        raise CheckpointError(f"{target} is the current folder, which cannot be replaced; give a folder that is not")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, which becomes `target` when the block ends well and is removed if not.

    Args:
        target: Must not exist, or be an empty folder.

    Raises:
        CheckpointError: There is something already, or nothing can be written there.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()) or (target.is_dir() and any(target.iterdir())):
        raise CheckpointError(f"{target} exists already and is not empty; give a folder that does not exist yet")
    require_apart(target)
    temporary = _beside(target)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{temporary} cannot be made ({error.strerror}); give another place to write to"
        ) from error
    try:
        yield temporary
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """The name of a temporary file beside `target`, which becomes `target` when the block ends well.

    Args:
        target: Must not exist.

    Raises:
        CheckpointError: There is something already, or nothing can be written there.
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already; give a name that does not")
    temporary = _beside(target)
    try:
        yield temporary
        _publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)  # over an empty folder too
        FileOps().sync_folder(target.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made ({error.strerror}); what was written is removed") from error


def _beside(target: Path) -> Path:
    return target.absolute().parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
