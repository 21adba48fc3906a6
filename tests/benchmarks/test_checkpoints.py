"""The benchmark of checkpoints: ratios within a round, and a run of it on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoint_contenders import OURS_BACKGROUND, OURS_NOW, PEER
from benchmarks.checkpoint_worker import Act, Reading, Request
from benchmarks.checkpoints import SAVERS, parse, table
from benchmarks.counting import Counts
from benchmarks.sections import checkpoint_ratio
from benchmarks.suite import runs
from tests.support.source_tree import ROOT, SOURCE


def test_ratios_are_taken_within_a_round_and_counts_of_the_rank_with_most() -> None:
    ours = [Reading(1, save=Act([1.0, 4.0], [1.0, 1.0], Counts(collectives=5), tensor_bytes=2**20)) for _ in range(2)]
    ours[1].save = Act([2.0, 1.0], [3.0, 1.0], Counts(collectives=5, opened=7))
    peer = [Reading(1, save=Act([4.0, 8.0], [2.0, 4.0], Counts(collectives=9)))]
    row = table({OURS_NOW: ours, PEER: peer}, "save")[2]
    assert row == "| ours | 3000 | 1500 | 0.50 | 0.62 | 5 | 0.0 | 7 | 0.00 | 0.00 | 0 | 1.00 |"


@pytest.mark.full
def test_a_run_compares_values_and_counts(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--rounds", "1", "--savers", OURS_NOW, "--out", str(tmp_path), "--name", "made"]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "checkpoints.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    document = json.loads((tmp_path / "made.json").read_text())
    assert document["what"] == "checkpoints"
    assert checkpoint_ratio(document["readings"], OURS_NOW, "save") > 0
    found = document["readings"]
    assert list(found) == [OURS_NOW, PEER]
    for ranks in found.values():
        assert len(ranks) == 2
        replicated = 65 * 4  # the step of each parameter, which only one rank writes
        written = sum(one["save"]["counts"]["written_bytes"] for one in ranks)
        assert written > sum(one["payload_bytes"] for one in ranks) - replicated
        for one in ranks:
            assert one["problems"] == []
            assert one["load"]["tensor_bytes"] > 0
            assert one["save"]["counts"]["collectives"] > 0
            assert len(one["load"]["wall_s"]) == 1
    assert "bit for bit" in (tmp_path / "made.md").read_text()


def test_the_suite_leaves_memory_out() -> None:
    (run,) = (run for run in runs(is_quick=False) if run.name == "checkpoints-large")
    request, files = parse([*run.arguments, "--out", "there", "--name", run.name])
    assert (request.model, request.ranks, request.measures_memory) == ("large", 2, False)
    assert request.savers == (OURS_NOW, OURS_BACKGROUND, PEER)
    assert files == Path("there") / "checkpoints-large"
    assert parse([]) == (Request("many-small", 2, 5, SAVERS, Path()), None)
