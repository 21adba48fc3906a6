"""Every single step of a save fails or is the last one of its process; what is found afterwards is whole."""

import json
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_fsdp.checkpoint import store as store_module
from megatron_fsdp.checkpoint.store import POINTER, CheckpointStore, FileOps, RunFolder
from megatron_fsdp.comm.processes import process_of
from megatron_fsdp.errors import CheckpointError

Fault = Literal["killed before", "killed halfway", "killed after", "error once", "errors from there on"]
FAULTS: tuple[Fault, ...] = ("killed before", "killed halfway", "killed after", "error once", "errors from there on")

FILES = ("a.distcp", "folder/b.distcp")


class Killed(BaseException):
    """The process is dead: whatever it tries from now on does nothing."""


class FaultyOps(FileOps):
    """Changes to the file system, of which number `at` goes wrong."""

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


def save(root: Path, iteration: int, content: str, ops: FileOps, overwrite: bool = False) -> None:
    CheckpointStore(root, keep_last=2, ops=ops).write(
        iteration, lambda folder: write_content(folder, content), overwrite=overwrite
    )


def nothing(_root: Path) -> None:
    pass


def two_saves(root: Path) -> None:
    for iteration in (5, 10):
        save(root, iteration, f"{iteration} old", FileOps())


def killed_runs(root: Path) -> None:
    """Two saves, and what processes killed in different steps have left."""
    two_saves(root)
    for name in (".iter_0000012.partial-1x1-1", ".iter_0000003.discarded-1x1-2", ".iter_0000005.replaced-1x1-3"):
        (root / name).mkdir()
        write_content(root / name, "left over")
    (root / f".{POINTER}.partial-1x1-4").write_text("12")
    (root / f".{POINTER}.partial-1x1-5").write_text("")


def killed_in_replacing(root: Path) -> None:
    """The checkpoint that the pointer names is on its way out, and the new one is not in its place yet."""
    two_saves(root)
    (root / "iter_0000010").rename(root / ".iter_0000010.replaced-1x1-1")
    (root / ".iter_0000010.partial-1x1-2").mkdir()
    write_content(root / ".iter_0000010.partial-1x1-2", "10 lost")


def killed_before_the_pointer_moved(root: Path) -> None:
    two_saves(root)
    (root / "iter_0000020").mkdir()
    write_content(root / "iter_0000020", "20 never pointed to")
    (root / f".{POINTER}.partial-1x1-1").write_text("20")


@dataclass(frozen=True)
class Scenario:
    """A folder, and the save that is disturbed in it."""

    prepare: Callable[[Path], None]
    iteration: int
    overwrite: bool
    before: str | None  # content of the latest checkpoint before; None where there is none
    kept: tuple[int, ...]  # the iterations that are there after a good save


SCENARIOS = {
    "first save": Scenario(nothing, 10, False, None, (10,)),
    "third save, one goes": Scenario(two_saves, 20, False, "10 old", (10, 20)),
    "replaces the one pointed to": Scenario(two_saves, 10, True, "10 old", (5, 10)),
    "replaces an older one": Scenario(two_saves, 5, True, "10 old", (5, 10)),
    "after killed runs": Scenario(killed_runs, 20, False, "10 old", (10, 20)),
    "after a kill while replacing": Scenario(killed_in_replacing, 20, False, "10 old", (10, 20)),
    "replaces after a kill while replacing": Scenario(killed_in_replacing, 10, True, "10 old", (5, 10)),
    "comes again to one never pointed to": Scenario(killed_before_the_pointer_moved, 20, False, "10 old", (10, 20)),
}


def disturbed(root: Path, scenario: Scenario, ops: FileOps) -> str:
    """Prepare and save; how it ended."""
    scenario.prepare(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what could not be deleted
        try:
            save(root, scenario.iteration, "new", ops, scenario.overwrite)
        except Killed:
            return "killed"
        except CheckpointError as error:
            return "error" if "No space left on device" in str(error) else str(error)
    return "saved"


def check_whole(root: Path, scenario: Scenario, ended: str) -> str | None:
    """What every reader must find; the content of the latest checkpoint."""
    folder = RunFolder(root)
    latest = folder.latest()
    pointed = folder.pointed()
    for iteration in folder.iterations():
        content_of(folder.resolve(iteration))
    if latest is None:
        assert scenario.before is None
        assert ended != "saved"
        return None
    assert pointed is None or latest == folder.find(int(pointed))
    found = content_of(latest)
    assert found in ({"new"} if ended == "saved" else {"new", scenario.before})
    return found


def check_next_save(root: Path, scenario: Scenario, found: str | None) -> None:
    """A run that goes on from what was found saves the iteration again if it was lost, and then tidies up."""
    if found != "new":
        save(root, scenario.iteration, "new", FileOps(), scenario.overwrite)
    else:
        save(root, scenario.iteration, "newer", FileOps(), overwrite=True)
    assert RunFolder(root).hidden() == []
    assert RunFolder(root).pointed() == scenario.iteration
    assert RunFolder(root).iterations() == list(scenario.kept)
    assert content_of(RunFolder(root).resolve()) == ("new" if found != "new" else "newer")


@pytest.mark.full(
    short=[
        "third save, one goes-killed halfway",
        "replaces the one pointed to-killed after",
        "after killed runs-errors from there on",
    ]
)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (name, fault)
        for row, name in enumerate(SCENARIOS)
        for column, fault in enumerate(FAULTS)
        if (row - column) % 5 in (0, 3)  # two of each scenario
    ],
)
def test_a_fault_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, name: str, fault: Fault) -> None:
    scenario = SCENARIOS[name]
    clean = FaultyOps()
    assert disturbed(tmp_path / "clean", scenario, clean) == "saved"
    assert len(clean.log) >= 11
    check_next_save(tmp_path / "clean", scenario, check_whole(tmp_path / "clean", scenario, "saved"))
    for step in range(len(clean.log)):
        root = tmp_path / f"step{step}"
        ended = disturbed(root, scenario, FaultyOps(step, fault))
        assert ended == "killed" if fault.startswith("killed") else ended in ("error", "saved")
        found = check_whole(root, scenario, ended)
        check_next_save(root, scenario, found)


def moves_pointer(step: str, path: Path) -> bool:
    return step == "rename" and path.name.startswith(f".{POINTER}")


def test_what_is_renamed_has_been_forced_to_the_disk(tmp_path: Path) -> None:
    ops = FaultyOps()
    root = tmp_path / "run"
    disturbed(root, SCENARIOS["replaces the one pointed to"], ops)
    steps = [(name, path.name if path != root else "root") for name, path in ops.log]
    staging = next(path for name, path in ops.log if name == "make_folder").name
    into_place = steps.index(("rename", staging))
    pointer_moves = next(number for number, step in enumerate(ops.log) if moves_pointer(*step))
    synced = {path for name, path in steps[:into_place] if name == "sync"}
    assert synced == {Path(name).name for name in FILES} | {".metadata", "folder", staging}
    assert steps[pointer_moves - 1] == ("sync", "root")
    assert ("write_file", steps[pointer_moves][1]) in steps[:into_place]
    assert steps[pointer_moves + 1] == ("sync", "root")
    assert all(name != "remove" for name, _ in steps[:pointer_moves])


def test_what_a_living_process_is_saving_is_not_taken_for_left_over(tmp_path: Path) -> None:
    replaced, first = tmp_path / "replaced", tmp_path / "first"

    def write(folder: Path) -> None:
        save(first, 20, "of another", FileOps())
        write_content(folder, "new")

    CheckpointStore(first).write(10, write)
    assert RunFolder(first).iterations() == [10, 20]
    assert content_of(first / "iter_0000010") == "new"
    assert RunFolder(first).hidden() == []

    class Slow(FileOps):
        """Another process saves when the old checkpoint is out of the way, and the new one has not its name yet."""

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if ".replaced-" in target.name:
                save(replaced, 20, "of another", FileOps())

    save(replaced, 10, "old", FileOps())
    save(replaced, 10, "new", Slow(), overwrite=True)
    assert RunFolder(replaced).pointed() == 10
    assert content_of(replaced / "iter_0000010") == "new"
    assert RunFolder(replaced).hidden() == []


# ---- processes that are killed ---------------------------------------------------------------------------------------


@contextmanager
def forked(act: Callable[[], object]) -> Iterator[None]:
    """Let a child do something, and kill it at the end of the block."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@contextmanager
def saving_child(root: Path, iteration: int) -> Iterator[str]:
    """Save in a child, which stays alive with its store for the block; what it was told."""
    here, there = os.pipe()

    def act() -> None:
        store, told = CheckpointStore(root, keep_last=2), b"saved"
        try:
            store.write(iteration, lambda folder: write_content(folder, "of a child"))
        except CheckpointError as error:
            told = str(error).encode()
        os.write(there, told)
        signal.pause()

    with forked(act):
        os.close(there)
        yield os.read(here, 10_000).decode()
    os.close(here)


def test_one_run_saves_in_a_folder_its_restarts_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the elastic agent lives that started the process, also where nobody holds the lock."""
    root, agent = tmp_path / "run", subprocess.Popen(["sleep", "1000"])
    name = json.dumps(asdict(process_of(agent.pid)))

    def save(iteration: int, by: str) -> CheckpointStore:
        monkeypatch.setattr(store_module, "launcher", lambda: by)
        store = CheckpointStore(root)
        store.write(iteration, lambda folder: write_content(folder, by))
        return store

    def is_refused() -> None:
        for by in ("", json.dumps(asdict(process_of(os.getpid())))):
            with pytest.raises(CheckpointError, match="another process saves its checkpoints in it now; give each run"):
                save(5, by)

    monkeypatch.setattr(store_module, "launcher", lambda: name)
    with saving_child(root, 1) as told:
        assert told == "saved"
    is_refused()
    again = save(2, name)
    with saving_child(root, 3) as told:
        assert "another process saves" in told
    again.close()
    save(3, "").close()  # the run has ended well
    monkeypatch.setattr(store_module, "launcher", lambda: name)
    with saving_child(root, 4) as told:
        assert told == "saved"
    is_refused()
    agent.kill()
    agent.wait()
    save(5, "").close()
    assert CheckpointStore(root).iterations() == [3, 4, 5]  # a child keeps two


def test_one_process_saves_in_a_folder(tmp_path: Path) -> None:
    """Until it closes its store, or is killed; loading, and other stores of its own, go on."""
    root = tmp_path / "run"
    store = CheckpointStore(root, keep_last=2)

    def write(store: CheckpointStore, iteration: int) -> None:
        store.write(iteration, lambda folder: write_content(folder, f"{iteration} here"))

    with saving_child(root, 1) as told:
        assert told == "saved"
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match=r"run: another process saves its checkpoints in it now; give each run"
            ):
                write(store, 2)
        assert store.iterations() == [1]
        assert not RunFolder(root).hidden()
    write(store, 2)
    other = CheckpointStore(root, keep_last=2)
    write(other, 3)
    with saving_child(root, 4) as told:
        assert "another process saves" in told
    other.close()
    write(store, 4)
    with saving_child(root, 5) as told:
        assert "another process saves" in told
    store.close()
    with saving_child(root, 5) as told:
        assert told == "saved"
    assert content_of(RunFolder(root).resolve()) == "of a child"
