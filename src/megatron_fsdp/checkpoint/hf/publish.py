"""A folder that appears at once and complete, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_fsdp.checkpoint.agree import decided_by_first, rank_of, together
from megatron_fsdp.checkpoint.publish import FileOps
from megatron_fsdp.errors import CheckpointError


@contextmanager
def new_folder(target: Path, sizes: Mapping[str, int], group: dist.ProcessGroup | None) -> Iterator[Path]:
    """A temporary folder beside the target, renamed to it at the end of the block; collective.

    Whatever goes wrong, nothing of it is left; a process that is killed leaves the hidden temporary folder, never a
    part of the target.

    Args:
        target: Not there yet, or an empty folder.
        sizes: Bytes of the files that must be there in the end, by name.
        group: The ranks.

    Yields:
        The temporary folder; every rank sees it.

    Raises:
        CheckpointError: The target holds something, the folder cannot be written, or ranks do not see the same files.
    """
    target = target.absolute()  # "." has no name of its own
    temporary = decided_by_first(lambda: _prepare(target), f"saving to {target}", group)
    try:
        together(f"saving to {target}", lambda: _check_shared(temporary), group)
        yield temporary
        decided_by_first(lambda: _publish(temporary, target, sizes), f"publishing {target}", group)
    except BaseException:
        if rank_of(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _prepare(target: Path) -> Path:
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link, which would be replaced; give the folder that it leads to")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is no folder; give one that is not there yet, or an empty one")
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty; give a folder that is not there yet, nothing is overwritten")
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.tmp"
    temporary.mkdir(parents=True)
    return temporary


def _check_shared(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointError(
            f"this rank does not see {temporary}, which the first one has made; save to a folder that all ranks share"
        )


def _publish(temporary: Path, target: Path, sizes: Mapping[str, int]) -> Path:
    files = FileOps()
    for name, size in sizes.items():
        path = temporary / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointError(
                f"{path} should have {size} bytes and has {found}; save to a folder that all ranks share"
            )
    for folder, _, names in os.walk(temporary):
        for name in names:
            if name not in sizes:  # those have been brought to the disk by their writers
                files.sync_file(Path(folder) / name)
        files.sync_folder(Path(folder))
    files.rename(temporary, target)
    files.sync_folder(target.parent)
    return target
