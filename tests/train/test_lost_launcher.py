"""A launcher that is killed while its ranks start: nobody trains on unseen."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.train import program
from tests.support.forked_programs import Program, trainer
from tests.support.settling import settled
from tests.support.train_program import LIMIT_S, OPTIONS, environment, write_text

_PIDS = "pids"


def trainer_that_loses_its_launcher(argv: Sequence[str]) -> int:
    """The trainer; its launcher is killed as soon as all ranks are started. Their processes are noted in TMPDIR."""
    module: Any = program
    start_all = module.start_processes

    def start_and_die(*args: Any) -> None:
        ranks = start_all(*args).pids().values()
        Path(os.environ["TMPDIR"], _PIDS).write_text(" ".join(map(str, ranks)))
        os.kill(os.getpid(), signal.SIGKILL)

    def join_late(*args: Any) -> Any:
        while os.getppid() == starter:  # as while a rank still imports
            time.sleep(0.01)
        return join(*args)

    join, starter = module.join_ranks, os.getpid()
    module.join_ranks, module.start_processes = join_late, start_and_die  # of this process and its ranks alone
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
    assert (len(ranks), alive) == (2, [])
