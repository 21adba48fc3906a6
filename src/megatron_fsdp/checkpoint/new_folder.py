"""Atomic creation of folders and files."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_fsdp.checkpoint.store import FileOps, require_seen
from megatron_fsdp.comm.agreement import decided_by_first, rank_of, together
from megatron_fsdp.errors import CheckpointError

_PATIENCE_S = 10.0


def require_apart(target: Path, source: Path | None = None) -> None:
    """Refuse a target folder that would overwrite or lie inside what is in use."""
    wanted = Path(os.path.realpath(target))
    if source is not None:
        origin = Path(os.path.realpath(source))
        if wanted == origin or origin in wanted.parents:
            where = "the checkpoint that is read" if wanted == origin else f"inside {source}, which is read"
            raise CheckpointError(f"{target} is {where}; give a folder outside of it")
    if wanted == Path(os.path.realpath(".")):
        raise CheckpointError(f"{target} is the current folder, which cannot be replaced; give a folder that is not")


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Make a file under a temporary name beside `target`, and rename it when the block ends well."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already; give a name that does not")
    temporary = _beside(target)
    try:
        yield temporary
        _rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(target: Path, text: str) -> None:
    """Write a small text file, over the one that is there: whole, or not at all."""
    temporary = _beside(target)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder under a temporary name beside `target`, and rename it when the block ends well.

    Else nothing of it is left; a process that is killed leaves the hidden folder, never a part of the target.
    """
    require_apart(target)
    temporary = _begin(target)
    try:
        yield temporary
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_shared_folder(target: Path, group: dist.ProcessGroup | None) -> Iterator[Path]:
    """Make a folder that several ranks write to, as `new_folder`, and yield its temporary name; collective."""
    target = target.absolute()  # "." has no name of its own
    temporary = decided_by_first(lambda: _begin(target), f"saving to {target}", group)

    try:
        together(f"saving to {target}", lambda: require_seen(temporary, _PATIENCE_S), group)
        yield temporary
        decided_by_first(lambda: _publish(temporary, target), f"publishing {target}", group)
    except BaseException:
        if rank_of(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(target: Path) -> Path:
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link, which would be replaced; give the folder that it leads to")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is no folder; give one that does not exist yet, or an empty one")
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target} exists already and is not empty; give a folder that does not exist yet")
    temporary = _beside(target)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{temporary} cannot be made ({error.strerror}); give another place to write to"
        ) from error
    return temporary


def _publish(temporary: Path, target: Path) -> None:
    FileOps().sync_tree(temporary)
    _rename(temporary, target)


def _rename(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)  # over an empty folder too
        FileOps().sync(target.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made ({error.strerror}); what was written is removed") from error


def _beside(target: Path) -> Path:
    return target.absolute().parent / f".{target.name}.{uuid.uuid4().hex[:12]}.tmp"
