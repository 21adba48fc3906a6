"""The benchmark of checkpoints: ratios within a round, and a run of it on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.checkpoint_contenders import OURS_NOW, PEER
from benchmarks.checkpoint_worker import Act, Reading
from benchmarks.checkpoints import table
from benchmarks.counting import Counts
from tests.support.source_tree import ROOT, SOURCE


def test_ratios_are_taken_within_a_round_and_counts_of_the_rank_with_most() -> None:
    ours = [Reading(1, save=Act([1.0, 4.0], [1.0, 1.0], Counts(collectives=5), tensor_bytes=2**20)) for _ in range(2)]
    ours[1].save = Act([2.0, 1.0], [3.0, 1.0], Counts(collectives=5, opened=7))
    peer = [Reading(1, save=Act([4.0, 8.0], [2.0, 4.0], Counts(collectives=9)))]
    row = table({OURS_NOW: ours, PEER: peer}, "save")[2]
    assert row == "| ours | 3000 | 1500 | 0.50 | 0.62 | 5 | 0.0 | 7 | 0.00 | 0.00 | 0 | 1.00 |"


def test_a_run_compares_values_and_counts(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--rounds", "1", "--savers", OURS_NOW, "--out", str(tmp_path)]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "checkpoints.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "checkpoints-tiny-2xcpu.json").read_text())["readings"]
    assert list(found) == [OURS_NOW, PEER]
    for ranks in found.values():
        assert len(ranks) == 2
        replicated = 65 * 4  # the step of each parameter, which only one rank writes
        written = sum(one["save"]["counts"]["written_bytes"] for one in ranks)
        assert written > sum(one["payload_bytes"] for one in ranks) - replicated
        for one in ranks:
            assert one["problems"] == []
            assert one["save"]["counts"]["collectives"] > 0
            assert len(one["load"]["wall_s"]) == 1
    assert "bit for bit" in (tmp_path / "checkpoints-tiny-2xcpu.md").read_text()
