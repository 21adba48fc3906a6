"""A host whose agent is asked to end: what was done is saved, and the run goes on on the other one."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.forked_programs import children_of
from tests.support.hosts import start_agent, two_hosts
from tests.support.train_program import LIMIT_S, by_step, metrics, run, wait_for, write_text

STEPS = 80
SAME = ("learning_rate", "samples", "data_checksum")


@pytest.mark.skipif(sys.platform != "linux", reason="uses network namespaces")
def test_the_run_goes_on_without_a_host_that_leaves_in_good_order(tmp_path: Path) -> None:
    data = ("--data-path", str(write_text(tmp_path / "text.txt")), "--train-iters", str(STEPS))
    alone, out, saved = tmp_path / "alone", tmp_path / "out", tmp_path / "saved"
    run(*data, "--nproc", "2", "--out", str(alone))
    with two_hosts() as (first, second):
        options = (*data, "--save", str(saved), "--load", str(saved), "--save-interval", "10", "--out", str(out))
        stays = start_agent(first, first, "1:2", 1, *options)
        leaves = start_agent(second, first, "1:2", 1, *options)
        wait_for(lambda: (saved / "iter_0000010").exists(), stays)
        ranks = children_of(leaves.pid)
        os.kill(leaves.pid, signal.SIGTERM)
        left = leaves.communicate(timeout=LIMIT_S)
        assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == [], left
        shown, errors = stays.communicate(timeout=LIMIT_S)
    assert stays.returncode == 0, errors[-3000:]
    assert "stopped and saved after " in " ".join(shown.split())
    assert list(by_step(out, "loss")) == list(range(1, STEPS + 1)), (shown[-3000:], errors[-3000:])
    assert [record["step"] for record in metrics(out)] == list(range(1, STEPS + 1))  # none came twice
    assert by_step(out, *SAME) == by_step(alone, *SAME)
    for step, (loss,) in by_step(alone, "loss").items():
        assert by_step(out, "loss")[step][0] == pytest.approx(loss, rel=2e-3)
