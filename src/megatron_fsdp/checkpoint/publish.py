"""Publishes a written folder as a checkpoint, in steps each of which leaves a whole one (docs/checkpoints.md).

One process does this. Whenever it is killed, `RunFolder` finds the previous checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from megatron_fsdp.checkpoint.run_folder import (
    MARK_OF_WHOLE,
    POINTER,
    Hidden,
    Purpose,
    RunFolder,
    hidden_name,
    is_whole,
)
from megatron_fsdp.errors import CheckpointError

_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


class FileOps:
    """Changes to the file system, which tests may replace."""

    def make_folder(self, path: Path) -> None:
        """Make one folder."""
        path.mkdir()

    def make_root(self, path: Path) -> None:
        """Make a folder and its parents, if missing."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a folder within its parent; atomic."""
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Replace a file by another; atomic."""
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
        """Force the names in a folder to the disk, if the file system supports that."""
        try:
            self.sync_file(path)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_FOLDERS:
                raise

    def remove_file(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and its content, if it exists."""
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if path.exists():  # another process removes it too; the next save removes the rest
                raise


def claim(path: Path, held: ExitStack) -> bool:
    """Lock a file or folder until `held` ends, or the process, however that ends.

    If the file system has no locks, or nothing can be opened, every claim succeeds. On NFS a lock of a file holds for
    all machines, that of a folder for this one.

    Returns:
        False where another process, or another call in this one, has it.
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


def to_prune(iterations: Iterable[int], pointed: int, keep_last: int | None) -> list[int]:
    """Return the iterations to delete, oldest first.

    Kept are the `keep_last` newest up to the one pointed to. What is newer than that belongs to a run that was given
    up for an earlier checkpoint; it is left to the user.

    Args:
        iterations: All whole ones.
        pointed: The one that the pointer names.
        keep_last: How many to keep; None: all.
    """
    if keep_last is None:
        return []
    upto = sorted(iteration for iteration in set(iterations) | {pointed} if iteration <= pointed)
    return upto[:-keep_last]


class Publisher:
    """Writes to the folder of a run. Hidden folders are claimed until `end`, so that they are not taken for leftovers.

    Attributes:
        folder: The folder of the run.
    """

    def __init__(self, folder: RunFolder, ops: FileOps) -> None:
        self.folder = folder
        self._ops = ops
        self._claims = contextlib.ExitStack()

    def begin(self, iteration: int, overwrite: bool) -> Path:
        """Remove leftovers of killed runs, and make an empty hidden folder to write a checkpoint into.

        Raises:
            CheckpointError: The iteration exists, and is not to be overwritten.
            OSError: The folder cannot be made.
        """
        root = self.folder.root
        self._ops.make_root(root)
        never_pointed_to = self._clear_leftovers()
        target = self.folder.path_of(iteration)
        is_taken = target.exists() or self.folder.find(iteration) is not None
        if is_taken and not overwrite and iteration not in never_pointed_to:
            state = "exists" if self.folder.find(iteration) else f"exists, without a {MARK_OF_WHOLE}"
            raise CheckpointError(f"{target} {state}; pass overwrite=True to replace it, or save another iteration")
        while True:
            staging = root / hidden_name(target.name, Purpose.PARTIAL)
            self._ops.make_folder(staging)
            if claim(staging, self._claims) and staging.exists():
                return staging
            # Another process took it for left over before it was claimed.

    def end(self) -> None:
        """Release what was claimed, after a save that was published or failed."""
        self._claims.close()

    def publish(self, staging: Path, iteration: int, keep_last: int | None) -> None:
        """Rename a written folder, point the pointer to it, and delete what is not kept.

        An error before the pointer has moved undoes all of it. Afterwards it is a warning, but for the last step that
        makes the move survive a power failure.

        Args:
            staging: What `begin` has made, with its files forced to the disk.
            iteration: The one to publish.
            keep_last: How many to keep; None: all.

        Raises:
            CheckpointError: The folder is not whole.
            OSError: As the file system says.
        """
        if not is_whole(staging):
            raise CheckpointError(f"the writer has left no {MARK_OF_WHOLE} in {staging}")
        for folder in _folders_bottom_up(staging):
            self._ops.sync_folder(folder)
        root = self.folder.root
        pointer = root / hidden_name(POINTER, Purpose.PARTIAL)
        target = self.folder.path_of(iteration)
        with contextlib.ExitStack() as undo:
            undo.callback(self._ops.remove_file, pointer)
            self._ops.write_file(pointer, str(iteration))
            claim(pointer, self._claims)
            if target.exists():
                claim(target, self._claims)
                aside = root / hidden_name(target.name, Purpose.REPLACED)
                self._ops.rename(target, aside)
                undo.callback(self._ops.rename, aside, target)
            self._ops.rename(staging, target)
            undo.callback(self._ops.rename, target, staging)
            self._ops.sync_folder(root)
            self._ops.replace(pointer, root / POINTER)
            undo.pop_all()
        self._ops.sync_folder(root)
        self._clear_replaced(iteration)
        for old in to_prune(self.folder.iterations(), iteration, keep_last):
            self.discard(self.folder.path_of(old))

    def discard(self, path: Path) -> None:
        """Delete a folder, if it exists, under a hidden name, so that no reader sees half of it.

        Failures are warnings.
        """
        hidden = Hidden.parse(path)
        with self._warning_of(f"{path} could not be deleted"):
            if hidden is None or hidden.purpose is not Purpose.DISCARDED:
                if not path.exists():
                    return
                name = path.name if hidden is None else hidden.name
                renamed = self.folder.root / hidden_name(name, Purpose.DISCARDED)
                self._ops.rename(path, renamed)
                path = renamed
            self._ops.remove_tree(path)

    def _clear_leftovers(self) -> set[int]:
        """Remove leftovers of killed processes; what a living one has claimed stays.

        Returns:
            Iterations that were renamed by a process that was killed before it could move the pointer. A run that
            resumes from the pointer reaches them again, and may replace them.
        """
        never_pointed_to: set[int] = set()
        for entry in self.folder.hidden():
            if entry.purpose is Purpose.DISCARDED:
                self.discard(entry.path)
            elif not entry.is_ours:  # those are of a save in progress
                with contextlib.ExitStack() as held:
                    if claim(entry.path, held):
                        never_pointed_to |= self._clear_leftover(entry)
        return never_pointed_to

    def _clear_leftover(self, entry: Hidden) -> set[int]:
        if entry.name == POINTER:
            return self._clear_pointer(entry)
        if entry.purpose is Purpose.PARTIAL:
            self.discard(entry.path)
        else:
            self._restore_or_discard(entry)
        return set()

    def _clear_pointer(self, entry: Hidden) -> set[int]:
        """Remove the unused pointer of a killed process, unless it names a checkpoint that was never pointed to."""
        iteration = _number_in(entry.path)
        if iteration is not None and self.folder.path_of(iteration).exists() and not self._is_pointed_to(iteration):
            return {iteration}
        with self._warning_of(f"{entry.path} could not be deleted"):
            self._ops.remove_file(entry.path)
        return set()

    def _is_pointed_to(self, iteration: int) -> bool:
        try:
            return self.folder.pointed() == iteration
        except CheckpointError:  # says nonsense, and is about to be replaced
            return False

    def _restore_or_discard(self, entry: Hidden) -> None:
        """Restore the name of a checkpoint that was about to be replaced, if no other has taken it."""
        published = self.folder.root / entry.name
        if not published.exists():
            with self._warning_of(f"{entry.path} could not be renamed to {published.name}"):
                self._ops.rename(entry.path, published)
        elif is_whole(published):
            self.discard(entry.path)

    def _clear_replaced(self, iteration: int) -> None:
        """Remove the previous version of an iteration, and pointers that mark it as never pointed to."""
        name = self.folder.path_of(iteration).name
        for entry in self.folder.hidden():
            if entry.purpose is Purpose.REPLACED and entry.name == name:
                self.discard(entry.path)
            elif entry.name == POINTER and _number_in(entry.path) == iteration:
                with self._warning_of(f"{entry.path} could not be deleted"):
                    self._ops.remove_file(entry.path)

    @contextlib.contextmanager
    def _warning_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            warnings.warn(f"{what} ({type(error).__name__}: {error})", RuntimeWarning, stacklevel=3)


def _number_in(path: Path) -> int | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return int(content) if content.isdigit() and len(content) < 19 else None


def _folders_bottom_up(path: Path) -> list[Path]:
    return [Path(folder) for folder, _, _ in os.walk(path, topdown=False)]
