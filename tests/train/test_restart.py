"""The files of a run that was killed and goes on from its checkpoint."""

import contextlib
import io
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fsdp.train.measure import Evaluation, StepRecord
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.train.recorder import read_lines, to_line
from megatron_fsdp.train.run_job import run_job
from tests.conftest import RunRanks
from tests.train.records import record

QUICK = (
    "--preset",
    "tiny",
    "--seq-length",
    "16",
    "--eval-iters",
    "1",
    "--prompt",
    "",
    "--eval-interval",
    "4",
    "--num-layers",
    "1",
)


def train(flags: list[str]) -> None:
    rank = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), os.getppid())
    with contextlib.redirect_stdout(io.StringIO()):
        run_job(resolve(parse_options(flags), World(rank.count, "cpu")), rank)


def test_files_of_a_restarted_run_are_those_of_a_run_in_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    text, saves = tmp_path / "text.txt", str(tmp_path / "saves")
    text.write_text("".join(f"line {i} of the text\n" for i in range(800)))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = [*QUICK, "--train-iters", "8", "--data-path", str(text)]
    run_ranks(2, train, [*common, "--out", str(whole)])

    saved = [*common, "--out", str(parts), "--save", saves, "--load", saves]
    run_ranks(2, train, [*saved, "--exit-interval", "4"])
    with (parts / "metrics.jsonl").open("a") as file:  # it went on to step 6 without a checkpoint, and was killed
        file.write(to_line(record(5)) + to_line(record(6)) + to_line(record(7))[:20])
    with (parts / "evaluations.jsonl").open("a") as file:
        file.write(to_line(Evaluation(6, 1.0)))
    run_ranks(2, train, saved)

    expected = [(r.step, r.loss, r.grad_norm, r.data_checksum) for r in read_lines(whole / "metrics.jsonl", StepRecord)]
    found = [(r.step, r.loss, r.grad_norm, r.data_checksum) for r in read_lines(parts / "metrics.jsonl", StepRecord)]
    assert found == expected
    assert [step for step, *_ in found] == list(range(1, 9))
    files = [read_lines(folder / "evaluations.jsonl", Evaluation) for folder in (whole, parts)]
    assert files[0] == files[1]
    assert [evaluation.step for evaluation in files[1]] == [4, 8]
    evaluations = json.loads((parts / "summary.json").read_text())["evaluations"]
    assert [evaluation["step"] for evaluation in evaluations] == [4, 8]  # those of the first part, too
