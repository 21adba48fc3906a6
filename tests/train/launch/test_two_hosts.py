"""Two hosts: sharding inside of each, replicas across; one is lost and comes back."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.forked_programs import children_of
from tests.support.hosts import start_agent, two_hosts
from tests.support.train_program import LIMIT_S, by_step, differences, run, wait_for, write_text

STEPS = 60
NUMBERS = ("loss", "grad_norm", "samples", "data_checksum")
GONE_S = 8.0  # the others notice after three missed signs of life, a second each
LAST = f"iter_{STEPS:07}"


@pytest.mark.skipif(sys.platform != "linux", reason="uses network namespaces")
def test_a_host_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text.txt"))
    same: tuple[str, ...] = ("--data-path", text, "--train-iters", str(STEPS), "--save-interval", "5")
    same = (*same, "--num-distributed-optimizer-instances", "2", "--micro-batch-size", "1")
    alone, out, saved = tmp_path / "alone", tmp_path / "out", tmp_path / "saved"
    run(*same, "--nproc", "4", "--save", str(alone / "saved"), "--out", str(alone))
    with two_hosts() as (first, second):
        options = (*same, "--save", str(saved), "--out", str(out))
        agent = start_agent(first, first, "2:2", 3, *options)
        lost = start_agent(second, first, "2:2", 3, *options)
        wait_for(lambda: (saved / "iter_0000010").exists(), agent)
        meshes = [(out / f"mesh{rank}.txt").read_text().split(maxsplit=1) for rank in range(4)]
        ranks = children_of(lost.pid)
        for pid in (lost.pid, *ranks):  # a host that loses its power
            os.kill(pid, signal.SIGKILL)
        time.sleep(GONE_S)
        back = start_agent(second, first, "2:2", 3, *options)
        ended = [program.communicate(timeout=LIMIT_S) for program in (agent, back)]
    assert (agent.returncode, back.returncode) == (0, 0), [errors[-3000:] for _, errors in ended]
    assert {mesh for _, mesh in meshes} == {"[[0, 1], [2, 3]]"}  # inner groups are rows
    assert meshes[0][0] == meshes[1][0] != meshes[2][0] == meshes[3][0] or not first.name
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1))
    assert by_step(out, *NUMBERS) == by_step(alone, *NUMBERS)
    assert differences(saved / LAST, alone / "saved" / LAST) == []
