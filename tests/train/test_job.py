import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_fsdp.train.arguments import Arguments, resolve_settings
from megatron_fsdp.train.job import run_job
from megatron_fsdp.train.metrics import read_records
from megatron_fsdp.train.ranks import Rank, agree

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.placement import ShardingStrategy
from tests.conftest import RunRanks

OPTIONS: dict[str, Any] = {
    "preset": "tiny",
    "steps": 8,
    "sequence_length": 16,
    "batch_size": 2,
    "dtype": "fp32",
    "device": "cpu",
    "evaluations": 2,
    "log_every": 3,
}


def this_rank() -> Rank:
    return Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), os.getppid())


def train(options: dict[str, Any]) -> None:
    run_job(resolve_settings(Arguments(**options), "cpu"), this_rank())


def refuse_on_first_rank() -> str:
    def work() -> None:
        raise ConfigurationError("no text")

    with pytest.raises(ConfigurationError) as caught:
        agree(this_rank(), work)
    return str(caught.value)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(800)))
    return path


@pytest.fixture(scope="module")
def one_process(run_ranks: RunRanks, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank without sharding on the whole batch."""
    out = tmp_path_factory.mktemp("reference")
    run_ranks(1, train, {**OPTIONS, "strategy": "0", "batch_size": 4, "data": str(text_file), "out": out})
    return out


def losses(out: Path) -> list[float]:
    return [record.loss for record in read_records(out / "metrics.jsonl")]


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_every_strategy_trains_as_one_process_does(
    strategy: ShardingStrategy, run_ranks: RunRanks, text_file: Path, one_process: Path, tmp_path: Path
) -> None:
    run_ranks(2, train, {**OPTIONS, "strategy": strategy.name, "data": str(text_file), "out": tmp_path})
    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=1e-4)
    assert summary(tmp_path)["held_out_loss"] == pytest.approx(summary(one_process)["held_out_loss"], rel=1e-4)


def test_accumulated_microbatches_train_as_one_batch_does(
    run_ranks: RunRanks, text_file: Path, one_process: Path, tmp_path: Path
) -> None:
    options = {**OPTIONS, "batch_size": 1, "grad_accumulation": 2, "data": str(text_file), "out": tmp_path}
    run_ranks(2, train, options)
    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=1e-4)


def test_traffic_and_persistent_memory_are_what_the_formulas_say(
    run_ranks: RunRanks, text_file: Path, tmp_path: Path
) -> None:
    run_ranks(2, train, {**OPTIONS, "dtype": "bf16", "data": str(text_file), "out": tmp_path})
    rows = {row["what"]: (row["measured"], row["formula"]) for row in summary(tmp_path)["rows"]}
    exact = {name: pair for name, pair in rows.items() if "peak" not in name}
    assert len(exact) == 6
    assert all(measured == formula > 0 for measured, formula in exact.values())


def test_run_leaves_metrics_curve_sample_and_summary(one_process: Path) -> None:
    records = read_records(one_process / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert records[-1].loss < records[0].loss - 1.0
    assert all(record.grad_norm > 0 and record.tokens_per_s > 0 and record.peak_bytes > 0 for record in records)
    assert (one_process / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (one_process / "sample.txt").read_text().startswith("def ")
    told = summary(one_process)
    assert [evaluation["step"] for evaluation in told["evaluations"]] == [4, 8]
    assert told["bits_per_byte"] == pytest.approx(told["held_out_loss"] / math.log(2))


def test_time_limit_ends_training_after_the_first_update_of_the_display(
    run_ranks: RunRanks, text_file: Path, tmp_path: Path
) -> None:
    run_ranks(2, train, {**OPTIONS, "minutes": 1e-9, "data": str(text_file), "out": tmp_path})
    assert len(losses(tmp_path)) == summary(tmp_path)["steps"] == 3


def test_pieces_of_words_can_be_the_tokens(run_ranks: RunRanks, text_file: Path, tmp_path: Path) -> None:
    run_ranks(2, train, {**OPTIONS, "tokenizer": "bpe", "data": str(text_file), "out": tmp_path})
    told = summary(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    assert told["bits_per_byte"] < 0.8 * told["held_out_loss"] / math.log(2)  # a token is more than a byte


def test_what_the_first_rank_refuses_every_rank_refuses(run_ranks: RunRanks) -> None:
    assert run_ranks(2, refuse_on_first_rank) == ["no text", "no text"]


def test_folder_of_an_earlier_run_is_refused(run_ranks: RunRanks, one_process: Path, text_file: Path) -> None:
    with pytest.raises(Exception, match="holds an earlier run: give a new folder"):
        run_ranks(1, train, {**OPTIONS, "data": str(text_file), "out": one_process})
