"""The checkpoints of a run in one folder: written under hidden names, published by renames, found again, and pruned.

<root>/latest_checkpointed_iteration.txt              the pointer: a decimal iteration, or `release`
<root>/iter_0000010/                                  a checkpoint
<root>/.iter_0000020.partial-<serial>/                being written, or left by a killed run
<root>/.iter_0000010.replaced-<serial>/               being replaced; counts until another one has its name
<root>/.iter_0000005.discarded-<serial>/              being deleted
<root>/.latest_checkpointed_iteration.txt.partial-<serial>   the next pointer
<root>/.claim-of-checkpoints                          locked by the process that saves

Whenever a process is killed, the previous checkpoint or the new one is found (docs/checkpoints.md has the steps).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from megatron_fsdp.checkpoint.report import decided_by_first, together
from megatron_fsdp.checkpoint.safe_read import open_file
from megatron_fsdp.comm.agreement import rank_of
from megatron_fsdp.comm.processes import is_launcher_alive, launcher
from megatron_fsdp.errors import CheckpointError, ConfigurationError

POINTER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MARK_OF_WHOLE = ".metadata"
CLAIM = ".claim-of-checkpoints"

Writer = Callable[[Path], object]
"""Writes this rank's files of a checkpoint into a folder; called on every rank."""
Purpose = Literal["partial", "replaced", "discarded"]

_FOLDER = re.compile(r"iter_(\d{7,18})", re.ASCII)
_NUMBER = re.compile(rb"\s*(\d{1,18})\s*")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<purpose>partial|replaced|discarded)-[\w-]+", re.ASCII)
_POINTER_BYTES = 64
_SHOWN = 8
_PATIENCE_S, _LOOK_AGAIN_S = 10.0, 0.05
_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


# ---- names -----------------------------------------------------------------------------------------------------------


class Hidden(NamedTuple):
    """A hidden entry of the folder: its path, the name it will have or had, and the reason."""

    path: Path
    name: str
    purpose: str


def hidden_name(name: str, purpose: Purpose) -> str:
    """Return a new hidden name, unique over processes and saves."""
    return f".{name}.{purpose}-{uuid.uuid4().hex[:16]}"


def folder_name(iteration: int) -> str:
    """Return the name of a checkpoint's folder."""
    if type(iteration) is not int or not 0 <= iteration < 10**18:
        raise ConfigurationError(f"iteration={iteration!r}: give a whole number from 0")
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the iteration of a folder's name; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found is not None and folder_name(int(found[1])) == name else None


def is_whole(path: Path) -> bool:
    """Return True if a folder holds the file that is written last."""
    return (path / MARK_OF_WHOLE).is_file()


# ---- finding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, read by one process."""

    root: Path

    def path_of(self, iteration: int) -> Path:
        """Return the published path of an iteration's checkpoint, which may not exist."""
        return self.root / folder_name(iteration)

    def hidden(self) -> list[Hidden]:
        """List the entries with hidden names, in the order of names; empty without the folder."""
        found = [(path, _HIDDEN.fullmatch(path.name)) for path in self._entries()]
        entries = [Hidden(path, parts["name"], parts["purpose"]) for path, parts in found if parts is not None]
        return [entry for entry in entries if entry.name == POINTER or iteration_of(entry.name) is not None]

    def iterations(self) -> list[int]:
        """List the iterations with a whole checkpoint, ascending."""
        numbers = {iteration_of(path.name) for path in self._entries() if is_whole(path)}
        numbers |= {iteration_of(entry.name) for entry in self._replaced()}
        return sorted(number for number in numbers if number is not None)

    def find(self, iteration: int) -> Path | None:
        """Return the whole checkpoint of an iteration, or the old one that a killed process was about to replace."""
        published = self.path_of(iteration)
        if is_whole(published):
            return published
        aside = [entry.path for entry in self._replaced() if entry.name == published.name]
        return aside[-1] if aside else None

    def pointed(self, pointer: Path | None = None) -> int | str | None:
        """Read the pointer: an iteration or `release`; None if there is no pointer."""
        pointer = self.root / POINTER if pointer is None else pointer
        try:
            with open_file(pointer) as stream:
                content = stream.read(_POINTER_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{pointer} cannot be read ({type(error).__name__}: {error})") from error
        if content.strip() == RELEASE.encode():
            return RELEASE
        number = _NUMBER.fullmatch(content)
        if number is None:
            raise CheckpointError(
                f"{pointer} says {content!r}, and should say an iteration or {RELEASE!r}; {self._whole_ones()}"
            )
        return int(number[1])

    def latest(self) -> Path | None:
        """Return the checkpoint that the pointer names; without a pointer the newest; None if there is none."""
        self._require_folder()
        pointed = self.pointed()
        if pointed is None:
            whole = self.iterations()
            return self.find(whole[-1]) if whole else None
        release = self.root / RELEASE
        found = self.find(pointed) if isinstance(pointed, int) else release if is_whole(release) else None
        if found is None:
            raise CheckpointError(
                f"{self.root / POINTER} says {pointed}, but there is no whole checkpoint of that name; "
                f"{self._whole_ones()}"
            )
        return found

    def resolve(self, iteration: int | None = None) -> Path:
        """Return the checkpoint of an iteration; without one the root if it is itself a checkpoint, or the latest."""
        if iteration is not None:
            wanted = self.path_of(iteration)
            self._require_folder()
            found = self.find(iteration)
            if found is None:
                state = f"is not whole: it has no {MARK_OF_WHOLE}" if wanted.exists() else "does not exist"
                raise CheckpointError(f"{wanted} {state}; {self._whole_ones()}")
            return found
        if is_whole(self.root):
            others = self.iterations()
            if others:
                raise CheckpointError(
                    f"{self.root} is a checkpoint itself (it has a {MARK_OF_WHOLE}), and the folder of a run with "
                    f"checkpoints of its own; give the folder of one of these, as {self.find(others[-1])}, or move its "
                    f"{POINTER} and iter_ folders elsewhere to load the other one"
                )
            return self.root
        latest = self.latest()
        if latest is None:
            missing = "" if self.root.exists() else ", which does not exist"
            raise CheckpointError(f"there is no checkpoint in {self.root}{missing}; give the folder of a run")
        return latest

    def _entries(self) -> list[Path]:
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def _replaced(self) -> list[Hidden]:
        return [entry for entry in self.hidden() if entry.purpose == "replaced" and is_whole(entry.path)]

    def _require_folder(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"{self.root} is a file; give the folder of a run")
        if is_whole(self.root) and iteration_of(self.root.name) is not None:
            raise CheckpointError(
                f"{self.root} is a checkpoint; give the folder of the run, {self.root.parent}, and the iteration"
            )
        if is_whole(self.root):
            raise CheckpointError(
                f"{self.root} is a checkpoint, and not the folder of a run, which holds {POINTER} and iter_ folders"
            )

    def _whole_ones(self) -> str:
        whole = self.iterations()
        if not whole:
            return f"there is no whole checkpoint in {self.root}"
        shown = ", ".join(str(iteration) for iteration in whole[-_SHOWN:])
        more = "..., " if len(whole) > _SHOWN else ""
        return f"whole ones in {self.root}: {more}{shown}; ask for one of these"


def locate(path: str | Path) -> Path:
    """Return the folder of one checkpoint: `path`, or the latest of a run; opening it reports faults."""
    run = RunFolder(Path(path))
    is_run = run.root.is_dir() and ((run.root / POINTER).exists() or run.iterations())
    return run.resolve() if is_run else run.root


# ---- publishing ------------------------------------------------------------------------------------------------------


class FileOps:
    """Changes to the file system, which tests may replace."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, and its parents if they are missing."""
        path.mkdir(parents=True)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a folder, or a file over another one; atomic."""
        source.replace(target)

    def write_file(self, path: Path, content: str) -> None:
        """Write a small file and force it to the disk."""
        with path.open("x", encoding="ascii") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())

    def sync(self, path: Path) -> None:
        """Force a file, or the names in a folder, to the disk; folders if the file system supports that."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if not path.is_dir() or error.errno not in _CANNOT_SYNC_FOLDERS:
                raise

    def sync_tree(self, root: Path) -> None:
        """Force everything in a folder to the disk."""
        for folder, _, names in os.walk(root, topdown=False):
            for name in names:
                self.sync(Path(folder, name))
            self.sync(Path(folder))

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all in it, if it exists."""
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            if path.exists():  # another process removes it too; the next save removes the rest
                raise


def claim(path: Path, held: ExitStack) -> bool:
    """Lock a file or folder until `held` ends, or the process in any way; False if another one has it.

    Without locks in the file system, or if nothing can be opened, every claim succeeds. Claims of one process exclude
    each other, and its children inherit them. On NFS a lock of a file holds for all machines, that of a folder for this
    one.
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


class RunClaim:
    """This process's claim to save in the folder of a run, until `release` or the end of the process, even a kill.

    A record lock (`fcntl.lockf`) of a file that is removed again: it is the process's own, so all its claims of one
    folder are one, and children do not inherit it. Releasing one ends it for the others too, until they take it again.
    If an elastic agent started this process, its name in the file continues the claim while that agent lives: between
    the death of ranks and their restart the lock is free.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / CLAIM
        self._descriptor: int | None = None
        self._unlock: Any = lambda: None

    def take(self) -> bool:
        """Claim the folder, which exists; False if another process has it.

        Without locks in the file system, or if nothing can be opened, every claim succeeds.
        """
        while True:
            try:
                if self._descriptor is None:
                    self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                    self._unlock = weakref.finalize(self, _unlock, self._path, self._descriptor)
                    self._unlock.atexit = not launcher()
                is_held = _lock(self._descriptor) and _continues(self._descriptor)
            except OSError:
                return True
            if not is_held or _is_open(self._path, self._descriptor):
                return is_held
            self.release()  # it was removed, or made anew, before it was locked

    def release(self) -> None:
        """Release the folder."""
        self._unlock()
        self._descriptor = None


def _lock(descriptor: int) -> bool:
    """Lock an open file for this process; False if another one has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _continues(descriptor: int) -> bool:
    """Name this process's launcher in a locked file; unlock it and return False if another one's claim lasts."""
    said, mine = os.pread(descriptor, 4096, 0).decode(errors="replace"), launcher()
    if said != mine:
        if is_launcher_alive(said):
            fcntl.lockf(descriptor, fcntl.LOCK_UN)
            return False
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, mine.encode(), 0)
    return True


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _unlock(path: Path, descriptor: int) -> None:
    """Remove a locked file if it is this process's, and close it."""
    with contextlib.suppress(OSError):
        if _lock(descriptor) and _is_open(path, descriptor) and _continues(descriptor):
            path.unlink()
    os.close(descriptor)


def to_prune(iterations: Iterable[int], pointed: int, keep_last: int | None) -> list[int]:
    """Return the iterations to delete, oldest first: all but the `keep_last` newest up to the one pointed to.

    Newer ones belong to a run that was abandoned for an earlier checkpoint; they are left to the user.
    """
    if keep_last is None:
        return []
    upto = sorted(iteration for iteration in set(iterations) | {pointed} if iteration <= pointed)
    return upto[:-keep_last]


class CheckpointStore:
    """The folder of a run, in Megatron's convention, shared by the ranks of a group (None: all, or this process alone).

    A folder counts as a checkpoint when it has its published name and holds `.metadata`. All methods but `path_of` are
    collective, and give the same on every rank: rank 0 looks, since a shared file system may show ranks different
    contents for a while. They also work without torch.distributed. One save at a time, by one process: the first save
    claims the folder until `close`.

    `keep_last` is the number of checkpoints to keep, up to the one that the pointer names; None: all.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        group: dist.ProcessGroup | None = None,
        patience_s: float = _PATIENCE_S,
        ops: FileOps | None = None,
    ) -> None:
        """Prepare a store; nothing is written yet."""
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ConfigurationError(f"keep_last={keep_last!r}: give a whole number from 1, or None to keep all")
        self.root = Path(root)
        self.keep_last = keep_last
        self.group = group
        self._patience_s = patience_s
        self._folder = RunFolder(self.root)
        self._claim = RunClaim(self.root)
        self._ops = FileOps() if ops is None else ops

    def close(self) -> None:
        """Allow other processes to save in the folder; another save claims it again."""
        self._claim.release()

    def path_of(self, iteration: int) -> Path:
        """Return the published path of an iteration's checkpoint (as `RunFolder.path_of`); not collective."""
        return self._folder.path_of(iteration)

    def iterations(self) -> list[int]:
        """List the iterations with a whole checkpoint, ascending; collective."""
        return decided_by_first(self._folder.iterations, f"looking into {self.root}", self.group)

    def latest(self) -> Path | None:
        """Call `RunFolder.latest` on rank 0, and return or raise its outcome; collective."""
        return self._found(self._folder.latest)

    def resolve(self, iteration: int | None = None) -> Path:
        """Call `RunFolder.resolve` on rank 0, and return or raise its outcome; collective."""
        return self._found(lambda: self._folder.resolve(iteration)) or self.root

    def _found(self, find: Callable[[], Path | None]) -> Path | None:
        def below_root() -> Path | None:  # ranks may see the root under different names
            path = find()
            return path and path.relative_to(self.root)

        found = decided_by_first(below_root, f"looking into {self.root}", self.group)
        return found and self.root / found

    def write(
        self, iteration: int, writer: Writer, *, overwrite: bool = False, group: dist.ProcessGroup | None = None
    ) -> Path:
        """Save a whole checkpoint, or nothing; collective.

        Every rank calls the writer with the same hidden folder, in which some rank has to leave `.metadata`; what it
        raises on some ranks must not leave others waiting in a collective of its own. Then the files are forced to the
        disk (those in the cache of another machine only that one can: its writer has to), the folder gets its name, the
        pointer moves to it, and old checkpoints go (docs/checkpoints.md says what a kill at any moment leaves).

        `overwrite`: a checkpoint of this iteration may be replaced. `group`: another one of the same ranks, as a
        background save needs; None: the store's.

        Raises:
            CheckpointError: A rank has met an error, the ranks share no file system, another process saves in the
                folder, or the iteration exists; the same message on every rank. Nothing was published, and what was
                written is removed.
            ConfigurationError: The iteration is no whole number from 0, or ranks give different ones.
        """
        group = self.group if group is None else group
        with ExitStack() as claims:  # written files are locked until the end
            name, may_replace, doing = decided_by_first(
                lambda: self._begin(iteration, overwrite, claims), f"saving iteration {iteration} in {self.root}", group
            )
            staging, same = self.root / name, {"iteration": repr(iteration)}
            is_first = rank_of(group) == 0  # read now: torch.distributed may be shut down after an error
            try:
                together(doing, lambda: require_seen(staging, self._patience_s), group, same)
                together(doing, lambda: writer(staging), group)
                decided_by_first(lambda: self._publish(staging, iteration, may_replace, claims), doing, group)
            except BaseException:
                if is_first:
                    self._remove(staging)
                raise
        return self.path_of(iteration)

    # ---- the work of rank 0 --

    def _begin(self, iteration: int, overwrite: bool, claims: ExitStack) -> tuple[str, bool, str]:
        """Remove leftovers of killed runs, and make an empty hidden folder to write a checkpoint into.

        Returns its name, whether a checkpoint of this iteration may be replaced, and a description of the coming work.
        """
        target = self.path_of(iteration)
        if is_whole(self.root):
            raise CheckpointError(
                f"{self.root} is a checkpoint itself (it has a {MARK_OF_WHOLE}); save in another folder, which holds "
                "nothing but the run's checkpoints"
            )
        with contextlib.suppress(FileExistsError):  # a file is in the way: the next step raises
            self.root.mkdir(parents=True, exist_ok=True)
        if not self._claim.take():
            raise CheckpointError(
                f"{self.root}: another process saves its checkpoints in it now; give each run a folder of its own, or "
                "start again when that one has ended"
            )
        may_replace = iteration in self._clear_leftovers() or overwrite
        found = self._folder.find(iteration)
        if (found or target.exists()) and not may_replace:
            state = "exists" if found else f"exists, without a {MARK_OF_WHOLE}"
            raise CheckpointError(f"{target} {state}; pass overwrite=True to replace it, or save another iteration")
        staging = self._make_hidden(target.name, self._ops.make_folder, claims)
        return staging.name, may_replace, f"saving {target}"

    def _make_hidden(self, name: str, make: Callable[[Path], None], claims: ExitStack) -> Path:
        """Make a file or folder under a new hidden name, and claim it for this save."""
        while True:
            path = self.root / hidden_name(name, "partial")
            make(path)
            if claim(path, claims) and path.exists():
                return path
            # Another thread that saves here took it for left over before it was claimed.

    def _publish(self, staging: Path, iteration: int, may_replace: bool, claims: ExitStack) -> None:
        """Rename a written folder, move the pointer to it, and delete old checkpoints.

        An error before the pointer has moved undoes all of it; a later one is a warning, except in the last step, which
        makes the move survive a power failure.
        """
        if not is_whole(staging):
            raise CheckpointError(f"the writer has left no {MARK_OF_WHOLE} in {staging}")
        self._ops.sync_tree(staging)
        target = self.path_of(iteration)
        with ExitStack() as undo:

            def write_pointer(path: Path) -> None:
                undo.callback(self._ops.remove, path)
                self._ops.write_file(path, str(iteration))

            pointer = self._make_hidden(POINTER, write_pointer, claims)
            if target.exists():
                if not may_replace:
                    raise CheckpointError(
                        f"another process has saved {target} meanwhile; give each run a folder of its own"
                    )
                claim(target, claims)
                aside = self.root / hidden_name(target.name, "replaced")
                self._ops.rename(target, aside)
                undo.callback(self._ops.rename, aside, target)
            self._ops.rename(staging, target)
            undo.callback(self._ops.rename, target, staging)
            self._ops.sync(self.root)
            self._ops.rename(pointer, self.root / POINTER)
            undo.pop_all()
        self._ops.sync(self.root)
        for entry in self._folder.hidden():
            if entry.purpose == "replaced" and entry.name == target.name:
                self._discard(entry.path, entry.name)
            elif self._iteration_in(entry.path) == iteration:  # it marked this one as never pointed to
                self._remove(entry.path)
        for old in to_prune(self._folder.iterations(), iteration, self.keep_last):
            self._discard(self.path_of(old), folder_name(old))

    def _remove(self, path: Path) -> None:
        """Delete a hidden entry, if it exists; failures are warnings."""
        with _warning_of(f"{path} could not be deleted"):
            self._ops.remove(path)

    def _discard(self, path: Path, name: str) -> None:
        """Delete a checkpoint, if it exists, under another hidden name, so that no reader sees half of it."""
        hidden = self.root / hidden_name(name, "discarded")
        with _warning_of(f"{path} could not be deleted"):
            if path.exists():
                self._ops.rename(path, hidden)
                self._ops.remove(hidden)

    def _clear_leftovers(self) -> set[int]:
        """Remove leftovers of killed processes; claims of a living one stay.

        Returns:
            The iterations that were renamed by a process that died before it moved the pointer: a run that resumes from
                the pointer reaches them again, and may replace them.
        """
        never_pointed_to: set[int] = set()
        for entry in self._folder.hidden():
            with ExitStack() as held:
                if not claim(entry.path, held):
                    continue
                iteration, published = self._iteration_in(entry.path), self.root / entry.name
                is_there = iteration is not None and self.path_of(iteration).exists()
                if iteration is not None and is_there and self._iteration_in(self.root / POINTER) != iteration:
                    never_pointed_to.add(iteration)
                elif entry.purpose != "replaced":
                    self._remove(entry.path)
                elif not published.exists():
                    with _warning_of(f"{entry.path} could not be renamed to {published.name}"):
                        self._ops.rename(entry.path, published)
                elif is_whole(published):
                    self._discard(entry.path, entry.name)
        return never_pointed_to

    def _iteration_in(self, pointer: Path) -> int | None:
        """Return the iteration that a pointer names; None for anything else, such as one that was cut off."""
        try:
            found = self._folder.pointed(pointer)
        except CheckpointError:
            return None
        return found if isinstance(found, int) else None


@contextlib.contextmanager
def _warning_of(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(f"{what} ({type(error).__name__}: {error})", RuntimeWarning, stacklevel=3)


def require_seen(folder: Path, patience_s: float) -> None:
    """Wait until this rank sees a folder that rank 0 has made."""
    deadline = time.monotonic() + patience_s
    while not folder.is_dir():
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"this rank does not see {folder}, which the first one has made; save to a folder that all ranks share"
            )
        time.sleep(_LOOK_AGAIN_S)


# ---- other new folders -------------------------------------------------------------------------------------


def require_apart(target: Path, source: Path | None = None) -> None:
    """Raise for a target folder that would overwrite a folder in use or lie inside it."""
    wanted = Path(os.path.realpath(target))
    if source is not None:
        origin = Path(os.path.realpath(source))
        if wanted == origin or origin in wanted.parents:
            where = "the checkpoint that is read" if wanted == origin else f"inside {source}, which is read"
            raise CheckpointError(f"{target} is {where}; give a folder outside of it")
    if wanted == Path(os.path.realpath(".")):
        raise CheckpointError(f"{target} is the current folder, which cannot be replaced; give a folder that is not")


def replace_text(target: Path, text: str) -> None:
    """Write a small text file over an existing one: whole, or not at all."""
    temporary = _beside(target)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder under a temporary name beside `target`, and rename it when the block ends well.

    Otherwise it is removed; a killed process leaves the hidden folder, never a part of the target.
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
    is_first = rank_of(group) == 0  # read now: torch.distributed may be shut down after an error
    try:
        together(f"saving to {target}", lambda: require_seen(temporary, _PATIENCE_S), group)
        yield temporary
        decided_by_first(lambda: _publish(temporary, target), f"publishing {target}", group)
    except BaseException:
        if is_first:
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
    try:
        temporary.rename(target)  # over an empty folder too
        FileOps().sync(target.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be made ({error.strerror}); what was written is removed") from error


def _beside(target: Path) -> Path:
    return target.absolute().parent / f".{target.name}.{uuid.uuid4().hex[:12]}.tmp"
