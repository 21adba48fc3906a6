"""The benchmark of checkpoints: ratios within a round, and a run of it on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoints import OURS_BACKGROUND, OURS_NOW, PEER
from benchmarks.page import checkpoint_table, saver_ratio
from tests.support.source_tree import ROOT, SOURCE


def test_ratios_are_taken_within_a_round_of_the_slowest_rank() -> None:
    peer = {"wall_s": [1.0, 4.0], "cpu_s": [1.0, 1.0], "counts": {"collectives": 9}}
    ours = {"wall_s": [2.0, 2.0], "cpu_s": [3.0, 3.0], "counts": {"collectives": 19, "written_bytes": 2**20}}
    readings = {"ours": [{"save": ours, "load": ours}], "fsdp2, dcp": [{"save": peer, "load": peer}] * 2}
    assert saver_ratio({"readings": readings}, "ours", "save") == 1.25  # 2 / 1 and 2 / 4
    text = checkpoint_table({"large": {"readings": readings}})
    assert "| large | save | ours | 1.25 | 3.00 | 19 | 1.00 |" in text


@pytest.mark.full
def test_a_run_compares_values_and_counts(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--rounds", "1", "--out", str(tmp_path / "made.json")]
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
    assert saver_ratio(document, OURS_NOW, "save") > 0
    found = document["readings"]
    assert list(found) == [OURS_NOW, OURS_BACKGROUND, PEER]
    for ranks in found.values():
        assert len(ranks) == 2
        replicated = 65 * 4  # the step of each parameter, which only one rank writes
        written = sum(one["save"]["counts"]["written_bytes"] for one in ranks)
        assert written > sum(one["payload_bytes"] for one in ranks) - replicated
        for one in ranks:
            assert one["problems"] == []
            assert one["save"]["counts"]["collectives"] > 0
            assert len(one["load"]["wall_s"]) == 1
