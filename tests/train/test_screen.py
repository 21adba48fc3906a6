"""What a run shows and writes."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from megatron_fsdp.train.measure import StepRecord
from megatron_fsdp.train.recorder import read_lines
from tests.conftest import RunRanks
from tests.support.train_program import train


def shown_by(*options: str) -> str:
    """What a rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        train(*options)
    return text.getvalue()


def test_the_first_rank_prints_a_line_an_interval_and_the_folder_gets_everything(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    steps = ("--train-iters", "12", "--log-interval", "4", "--eval-interval", "6", "--global-batch-size", "5")
    text, nothing = run_ranks(2, shown_by, *steps, *data, "--out", str(tmp_path))
    assert nothing == ""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if "/12  " in line]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", time) for time, _ in lines)
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 100
    found = [(line[:10], "held-out loss" in line, " left  loss " in line) for _, line in lines]
    figures, losses = ([(f"step {step:>2}/12", held, not held) for step in (4, 6, 8, 12)] for held in (False, True))
    assert found == [figures[0], figures[1], losses[1], figures[2], figures[3], losses[3]]
    assert "TFLOP/s" not in text
    assert "MFU not shown: the peak of this device is unknown; give --peak-tflops" in text
    assert "1 unit (Block) beside the root" in text
    assert "\nbatch    global 5 = 2 ranks x 2 microbatches x 2 - 3 that only fill up\n" in text

    records = read_lines(tmp_path / "metrics.jsonl", StepRecord)
    assert [record.step for record in records] == list(range(1, 13))
    assert all(record.tflops > 0 for record in records)
    assert all((0 < record.exposed_share < 1) == (record.step % 4 == 0) for record in records)
    found = json.loads((tmp_path / "applied.json").read_text(), parse_constant=pytest.fail)
    assert (found["options"]["train_iters"], found["origins"]["train_iters"]) == (12, "command line")
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["progress"]["steps"] == 12
    assert summary["evaluations"][-1]["loss"] == summary["held_out_loss"]
