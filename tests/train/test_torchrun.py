"""The command lines of torchrun, a rank that is killed under it, and what listens meanwhile."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.forked_programs import Program, children_of, remains, torchrun
from tests.support.source_tree import ROOT
from tests.support.train_program import LIMIT_S, OPTIONS, by_step, environment, wait_for, write_text
from tests.train.test_program import listening

STEPS = 60
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1


@pytest.mark.full(short=["entry0"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks and sockets")
@pytest.mark.parametrize("entry", [("-m", "megatron_fsdp.train"), (str(ROOT / "pretrain_gpt.py"),)])
def test_ranks_under_torchrun_talk_on_loopback_and_go_on_after_a_kill(entry: tuple[str, ...], tmp_path: Path) -> None:
    out, saved, temporary = (tmp_path / name for name in ("out", "saved", "temporary"))
    temporary.mkdir()
    own = ("--data-path", str(write_text(tmp_path / "text.txt")), "--train-iters", str(STEPS), "--save", str(saved))
    of_torchrun = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    command = [*of_torchrun, *entry, *OPTIONS, *own, "--save-interval", "15", "--out", str(out)]
    program = Program(torchrun, command, environment(TMPDIR=str(temporary)))
    wait_for(lambda: (saved / "iter_0000015").exists(), program)
    ranks = children_of(program.pid)
    assert len(ranks) == 2
    found = listening(ranks, inherited_from=program.pid)
    assert found  # gloo's own: sockets are seen at all
    assert found <= LOOPBACK
    os.kill(ranks[1], signal.SIGKILL)
    shown, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors[-3000:]
    assert f"loaded {saved}" in shown
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1))
    assert (saved / f"iter_{STEPS:07}").exists()
    assert [name for name in remains(temporary, ranks) if not name.startswith("torchelastic_")] == []  # torchrun's logs
