"""The files of a run that was killed and goes on from its checkpoint."""

import json
from pathlib import Path

from megatron_fsdp.train.measure import Evaluation, StepRecord
from megatron_fsdp.train.recorder import read_lines, to_line
from tests.conftest import RunRanks
from tests.support.train_program import train
from tests.train.records import record


def test_files_of_a_restarted_run_are_those_of_a_run_in_one(
    run_ranks: RunRanks, text_file: Path, tmp_path: Path
) -> None:
    saves, whole, parts = str(tmp_path / "saves"), tmp_path / "whole", tmp_path / "parts"
    common = ("--data-path", str(text_file), "--eval-interval", "4")
    run_ranks(2, train, *common, "--out", str(whole))

    saved = (*common, "--out", str(parts), "--save", saves, "--load", saves)
    run_ranks(2, train, *saved, "--exit-interval", "4")
    with (parts / "metrics.jsonl").open("a") as file:  # it went on to step 6 without a checkpoint, and was killed
        file.write(to_line(record(5)) + to_line(record(6)) + to_line(record(7))[:20])
    with (parts / "evaluations.jsonl").open("a") as file:
        file.write(to_line(Evaluation(6, 1.0)))
    run_ranks(2, train, *saved)

    expected = [(r.step, r.loss, r.grad_norm, r.data_checksum) for r in read_lines(whole / "metrics.jsonl", StepRecord)]
    found = [(r.step, r.loss, r.grad_norm, r.data_checksum) for r in read_lines(parts / "metrics.jsonl", StepRecord)]
    assert found == expected
    assert [step for step, *_ in found] == list(range(1, 9))
    files = [read_lines(folder / "evaluations.jsonl", Evaluation) for folder in (whole, parts)]
    assert files[0] == files[1]
    assert [evaluation.step for evaluation in files[1]] == [4, 8]
    evaluations = json.loads((parts / "summary.json").read_text())["evaluations"]
    assert [evaluation["step"] for evaluation in evaluations] == [4, 8]  # those of the first part, too
