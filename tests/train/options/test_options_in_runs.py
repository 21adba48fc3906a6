"""Options that a run shows: each changes its steps, its evaluations or its end, on one rank."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World, resolve
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.train.run_job import run_job
from tests.conftest import RunRanks

BASE = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --train-iters 4 "
    "--lr 0.05 --lr-decay-style constant --device cpu --use-megatron-fsdp --log-interval 1 --eval-iters 1"
)


def run_once(words: str, data: str, out: str) -> dict[str, Any]:
    """Train on this rank and return what the run left behind."""
    words = f"{BASE} {words} --data-path {data} --out {out}"
    job = resolve(parse_options(words.split()), World(1, "cpu"))
    run_job(job, Rank(0, dist.get_world_size(), torch.device("cpu"), os.getppid()))
    lines = [] if "--skip-train" in words else (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((Path(out) / "summary.json").read_text(encoding="utf-8"))
    return {"steps": [json.loads(line) for line in lines], **summary}


@pytest.fixture(scope="module")
def base(run_ranks: RunRanks, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, run_once, "", str(text_file), str(tmp_path_factory.mktemp("base")))[0]


@pytest.fixture
def run(run_ranks: RunRanks, text_file: Path, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    return lambda words: run_ranks(1, run_once, words, str(text_file), str(tmp_path / "out"))[0]


def losses(result: Mapping[str, Any]) -> list[float]:
    return [step["loss"] for step in result["steps"]]


def test_the_seed_changes_weights_and_samples(base: dict[str, Any], run: Callable[[str], dict[str, Any]]) -> None:
    changed = run("--seed 9")
    assert losses(changed)[0] != losses(base)[0]
    assert changed["steps"][0]["data_checksum"] != base["steps"][0]["data_checksum"]


def test_batches_evaluations_and_the_end_are_as_they_are_said(
    base: dict[str, Any], run: Callable[[str], dict[str, Any]]
) -> None:
    logged = "--log-params-norm --log-num-zeros-in-grad"
    changed = run(f"--global-batch-size 6 --eval-interval 2 --exit-interval 3 {logged}")
    assert [(step["step"], step["samples"]) for step in base["steps"]] == [(1, 2), (2, 4), (3, 6), (4, 8)]
    assert [(step["step"], step["samples"]) for step in changed["steps"]] == [(1, 6), (2, 12), (3, 18)]
    assert [each["step"] for each in base["evaluations"]] == [4]
    assert [each["step"] for each in changed["evaluations"]] == [2, 3]
    assert all(step["params_norm"] is None and step["num_zeros_in_grad"] is None for step in base["steps"])
    assert all(step["params_norm"] > 0 and step["num_zeros_in_grad"] >= 0 for step in changed["steps"])


def test_an_evaluation_sees_as_many_batches_as_it_is_said(
    base: dict[str, Any], run: Callable[[str], dict[str, Any]]
) -> None:
    changed = run("--eval-iters 2")
    assert losses(changed) == losses(base)
    assert changed["evaluations"][0]["loss"] != base["evaluations"][0]["loss"]


def test_skipping_training_leaves_the_initial_weights(run: Callable[[str], dict[str, Any]]) -> None:
    result = run("--skip-train")
    assert result["progress"]["steps"] == 0
    assert result["held_out_loss"] == pytest.approx(math.log(256), rel=0.1)
