"""Steps of publishing that fail, or at which the process is killed, one after another."""

from pathlib import Path
from typing import Any, Literal

from megatron_fsdp.checkpoint.store import FileOps

Fault = Literal["killed before", "killed halfway", "killed after", "error once", "errors from there on"]
FAULTS: tuple[Fault, ...] = ("killed before", "killed halfway", "killed after", "error once", "errors from there on")

FILES = ("a.distcp", "folder/b.distcp")


class Killed(BaseException):
    """The process is dead: whatever it tries from now on does nothing."""


class FaultyOps(FileOps):
    """Changes to the file system, of which number `at` goes wrong.

    Attributes:
        log: Name and path of every step that was begun.
    """

    def __init__(self, at: int | None = None, fault: Fault = "error once") -> None:
        self.log: list[tuple[str, Path]] = []
        self._at = at
        self._fault = fault
        self._is_dead = False

    def _step(self, name: str, path: Path, *rest: Any) -> None:
        if self._is_dead:
            raise Killed
        number = len(self.log)
        self.log.append((name, path))
        if self._at is None or number < self._at:
            act(self, name, path, *rest)
            return
        if self._fault.startswith("error"):
            if self._fault == "error once" and number > self._at:
                act(self, name, path, *rest)
                return
            raise OSError(28, "No space left on device")
        if self._fault == "killed halfway":
            halfway(name, path)
        if self._fault == "killed after":
            act(self, name, path, *rest)
        self._is_dead = True
        raise Killed

    def make_folder(self, path: Path) -> None:
        self._step("make_folder", path)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename", source, target)

    def write_file(self, path: Path, content: str) -> None:
        self._step("write_file", path, content)

    def sync(self, path: Path) -> None:
        self._step("sync", path)

    def remove(self, path: Path) -> None:
        self._step("remove", path)


def act(ops: FileOps, name: str, path: Path, *rest: Any) -> None:
    """Do a step, without forcing anything to the disk: thousands of steps are done, and no machine stops."""
    if name == "write_file":
        path.write_text(*rest)
    elif name != "sync":
        getattr(FileOps, name)(ops, path, *rest)


def halfway(name: str, path: Path) -> None:
    """What a killed process leaves of the steps that are not atomic."""
    if name == "write_file":
        path.write_text("")
    if name == "remove" and path.is_dir():
        (path / FILES[0]).unlink(missing_ok=True)  # and `.metadata` is still there


def write_content(folder: Path, content: str) -> None:
    """A small checkpoint, all of whose files say the same."""
    (folder / "folder").mkdir(exist_ok=True)
    for name in (*FILES, ".metadata"):
        (folder / name).write_text(content)


def content_of(folder: Path) -> str:
    """What a whole checkpoint says."""
    said = {(folder / name).read_text() for name in (*FILES, ".metadata")}
    assert len(said) == 1, f"{folder} is mixed of {said}"
    return said.pop()
