"""The few things that publishing does to the file system, each one step; tests put their own in to let steps fail."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


class FileOps:
    """Changes to the file system."""

    def make_folder(self, path: Path) -> None:
        """Make one folder."""
        path.mkdir()

    def make_root(self, path: Path) -> None:
        """Make a folder and those above, where they are not there."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder another name in the same folder; atomic."""
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Put a file in the place of another; atomic."""
        source.replace(target)

    def write_file(self, path: Path, content: str) -> None:
        """Write a small file and force it to the disk."""
        with path.open("x", encoding="ascii") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())

    def sync_file(self, path: Path) -> None:
        """Force a file to the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Force the names in a folder to the disk, where the file system can do that with folders."""
        try:
            self.sync_file(path)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_FOLDERS:
                raise

    def remove_file(self, path: Path) -> None:
        """Remove a file that may be gone already."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it; it may be gone already."""
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if path.exists():  # somebody else removes it too; what they leave is removed next time
                raise


def claim(path: Path, held: ExitStack) -> bool:
    """Lock a file or folder until `held` ends, or the process, however that ends.

    Where the file system knows no locks, or nothing can be opened, nobody is refused. On NFS a lock of a file holds for
    all machines, that of a folder for this one.

    Returns:
        False where somebody else has it: another process, or another call in this one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except OSError:
        return True
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)  # also where a forked child still has it open
    return True
