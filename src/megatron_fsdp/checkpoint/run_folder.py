"""The folder of a run: names, which folders are checkpoints, and which is the latest. Reads only, without ranks.

<root>/latest_checkpointed_iteration.txt              the pointer: a decimal iteration, or `release`
<root>/iter_0000010/                                  a checkpoint
<root>/.iter_0000020.partial-<owner>-<serial>/        being written, or left by a killed run
<root>/.iter_0000010.replaced-<owner>-<serial>/       being replaced; counts until another one has its name
<root>/.iter_0000005.discarded-<owner>-<serial>/      being deleted
<root>/.latest_checkpointed_iteration.txt.partial-<owner>-<serial>   the next pointer
"""

from __future__ import annotations

import functools
import os
import re
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_fsdp.checkpoint.safe_read import open_file
from megatron_fsdp.errors import CheckpointError, ConfigurationError

POINTER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MARK_OF_WHOLE = ".metadata"

_FOLDER = re.compile(r"iter_(\d{7,18})", re.ASCII)
_NUMBER = re.compile(rb"\s*(\d{1,18})\s*")
_HIDDEN = re.compile(
    r"\.(?P<name>.+)\.(?P<purpose>partial|replaced|discarded)-(?P<owner>\w+)-(?P<serial>\w+)", re.ASCII
)
_POINTER_BYTES = 64
_SHOWN = 8


class Purpose(StrEnum):
    """Why an entry has a hidden name."""

    PARTIAL = "partial"
    REPLACED = "replaced"
    DISCARDED = "discarded"


@dataclass(frozen=True)
class Hidden:
    """A hidden entry of the folder.

    Attributes:
        path: Where it is.
        name: What it will be, or was, called.
        purpose: Why it is hidden.
        is_ours: Whether this process made it.
    """

    path: Path
    name: str
    purpose: Purpose
    is_ours: bool

    @classmethod
    def parse(cls, path: Path) -> Hidden | None:
        """Parse a path; None if it is not one of ours."""
        found = _HIDDEN.fullmatch(path.name)
        if found is None or (found["name"] != POINTER and iteration_of(found["name"]) is None):
            return None
        return cls(path, found["name"], Purpose(found["purpose"]), found["owner"] == _owner(os.getpid()))


def hidden_name(name: str, purpose: Purpose) -> str:
    """Make a new hidden name, unique over processes and saves."""
    return f".{name}.{purpose}-{_owner(os.getpid())}-{uuid.uuid4().hex[:8]}"


@functools.cache
def _owner(process: int) -> str:
    """Return a word that identifies this process: its number alone may be reused after a restart."""
    return f"{process}x{uuid.uuid4().hex[:12]}"


def folder_name(iteration: int) -> str:
    """Return the name of a checkpoint's folder.

    Raises:
        ConfigurationError: The iteration is no whole number from 0.
    """
    if type(iteration) is not int or not 0 <= iteration < 10**18:
        raise ConfigurationError(f"iteration={iteration!r}: give a whole number from 0")
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the iteration of a folder's name; None for any other name."""
    found = _FOLDER.fullmatch(name)
    if found is None or folder_name(int(found[1])) != name:
        return None
    return int(found[1])


def is_whole(path: Path) -> bool:
    """Return whether a folder holds the file that is written last."""
    return (path / MARK_OF_WHOLE).is_file()


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, read by one process.

    Attributes:
        root: The folder.
    """

    root: Path

    def path_of(self, iteration: int) -> Path:
        """Return where the checkpoint of an iteration is published, whether it exists or not.

        Raises:
            ConfigurationError: The iteration is no whole number from 0.
        """
        return self.root / folder_name(iteration)

    def hidden(self) -> list[Hidden]:
        """List the entries with hidden names, in the order of names; empty if there is no folder."""
        found = (Hidden.parse(path) for path in self._entries())
        return [entry for entry in found if entry is not None]

    def iterations(self) -> list[int]:
        """List the iterations with a whole checkpoint, ascending."""
        numbers = {iteration_of(path.name) for path in self._entries() if is_whole(path)}
        numbers |= {iteration_of(entry.name) for entry in self._replaced()}
        return sorted(number for number in numbers if number is not None)

    def find(self, iteration: int) -> Path | None:
        """Return the whole checkpoint of an iteration; None if there is none.

        A process that was killed while it replaced a checkpoint may have left the old one under its hidden name.
        """
        published = self.path_of(iteration)
        if is_whole(published):
            return published
        aside = [entry.path for entry in self._replaced() if entry.name == published.name]
        return aside[-1] if aside else None

    def pointed(self) -> int | str | None:
        """Read the pointer: an iteration or `release`; None if there is no pointer.

        Raises:
            CheckpointError: It has other content, or cannot be read.
        """
        pointer = self.root / POINTER
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
        """Return the checkpoint that the pointer names; without a pointer the newest; None if there is none.

        Raises:
            CheckpointError: The root is no folder or a checkpoint itself, the pointer is invalid, or names one that
                is not there.
        """
        self._require_folder()
        pointed = self.pointed()
        if pointed is None:
            whole = self.iterations()
            return self.find(whole[-1]) if whole else None
        found = self._release() if isinstance(pointed, str) else self.find(pointed)
        if found is None:
            raise CheckpointError(
                f"{self.root / POINTER} says {pointed}, but there is no whole checkpoint of that name; "
                f"{self._whole_ones()}"
            )
        return found

    def resolve(self, iteration: int | None = None) -> Path:
        """Return the checkpoint of an iteration, or the latest one.

        Raises:
            CheckpointError: As `latest`, or there is no such checkpoint.
            ConfigurationError: The iteration is no whole number from 0.
        """
        if iteration is None:
            latest = self.latest()
            if latest is None:
                missing = "" if self.root.exists() else ", which does not exist"
                raise CheckpointError(f"there is no checkpoint in {self.root}{missing}; give the folder of a run")
            return latest
        wanted = self.path_of(iteration)
        self._require_folder()
        found = self.find(iteration)
        if found is None:
            state = f"is not whole: it has no {MARK_OF_WHOLE}" if wanted.exists() else "does not exist"
            raise CheckpointError(f"{wanted} {state}; {self._whole_ones()}")
        return found

    def _entries(self) -> list[Path]:
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def _replaced(self) -> list[Hidden]:
        return [entry for entry in self.hidden() if entry.purpose is Purpose.REPLACED and is_whole(entry.path)]

    def _release(self) -> Path | None:
        path = self.root / RELEASE
        return path if is_whole(path) else None

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
