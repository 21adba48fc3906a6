"""A launcher that is killed while its ranks start: nobody trains on unseen, and nothing is left behind."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.train import program
from megatron_fsdp.train.launch.crew import Crew, tidy_after_launcher
from tests.support.forked_programs import Program, trainer
from tests.support.settling import settled
from tests.support.train_program import LIMIT_S, OPTIONS, environment, write_text

_PIDS = "pids"


def trainer_that_loses_its_launcher(argv: Sequence[str]) -> int:
    """The trainer; its launcher is killed as soon as all ranks are started. Their processes are noted in TMPDIR."""
    tempfile.tempdir = None  # what it was when the server started
    start_all = Crew.__init__

    def start_and_die(self: Crew, *args: Any) -> None:
        start_all(self, *args)
        Path(os.environ["TMPDIR"], _PIDS).write_text(" ".join(str(rank.pid) for rank in self._processes))
        os.kill(os.getpid(), signal.SIGKILL)

    def join_late(*args: Any) -> Any:
        while os.getppid() == launcher:  # as while a rank still imports
            time.sleep(0.01)
        return join(*args)

    module: Any = program
    join, launcher = module.join_ranks, os.getpid()
    module.join_ranks = join_late
    Crew.__init__ = start_and_die  # type: ignore[method-assign]  # of this process and its ranks alone
    return trainer(argv)


def lives(process: Path) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks")
def test_ranks_end_whose_launcher_was_killed_while_they_started(tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    text = str(write_text(tmp_path / "text.txt"))
    options = (*OPTIONS, "--data-path", text, "--out", str(tmp_path / "out"), "--train-iters", "1000000")
    started = Program(trainer_that_loses_its_launcher, options, environment(TMPDIR=str(place)))
    started.communicate(timeout=LIMIT_S)
    assert started.returncode == -signal.SIGKILL
    ranks = [Path("/proc", pid) for pid in (place / _PIDS).read_text().split()]
    try:
        alive = settled(lambda: [rank for rank in ranks if lives(rank)], lambda found: not found)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int(rank.name), signal.SIGKILL)
    assert (len(ranks), alive, [path.name for path in place.iterdir()]) == (2, [], [_PIDS])


@pytest.mark.parametrize(
    ("launcher", "name", "stays"), [("me", "mfsdp-run-x", True), ("1", "mfsdp-run-x", False), ("1", "mine", True)]
)
def test_only_the_folder_of_a_launcher_that_is_gone_is_removed(
    launcher: str, name: str, stays: bool, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    pid = str(os.getppid()) if launcher == "me" else launcher
    tidy_after_launcher({"MEGATRON_FSDP_LAUNCHER_PID": pid, "MEGATRON_FSDP_STORE_FILE": str(folder / "store-0")})
    assert folder.exists() is stays
