import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.train.measure import StepRecord
from megatron_fsdp.train.options.command_line import PRESETS, Layer, assemble
from megatron_fsdp.train.options.job import World, resolve
from megatron_fsdp.train.recorder import read_lines
from megatron_fsdp.train.run_job import run_job
from tests.conftest import RunRanks
from tests.support.train_program import this_rank

OPTIONS: dict[str, Any] = {
    "train_iters": 8,
    "seq_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "eval_interval": 4,
    "log_interval": 3,
}


def train(options: dict[str, Any]) -> None:
    rank = this_rank()
    layers = (Layer("preset tiny", PRESETS["tiny"], gives_way=True), Layer("command line", options))
    run_job(resolve(assemble(layers), World(rank.count, "cpu")), rank)


@pytest.fixture(scope="module")
def one_process(run_ranks: RunRanks, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank without sharding on the whole batch."""
    out = tmp_path_factory.mktemp("reference")
    values = {"data_parallel_sharding_strategy": "no_shard", "micro_batch_size": 4}
    run_ranks(1, train, {**OPTIONS, **values, "data_path": str(text_file), "out": str(out)})
    return out


def losses(out: Path) -> list[float]:
    return [record.loss for record in read_lines(out / "metrics.jsonl", StepRecord)]


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def test_two_ranks_train_and_evaluate_as_one_process_does(
    run_ranks: RunRanks, text_file: Path, one_process: Path, tmp_path: Path
) -> None:
    run_ranks(2, train, {**OPTIONS, "micro_batch_size": 1, "data_path": str(text_file), "out": str(tmp_path)})
    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=1e-4)
    assert summary(tmp_path)["held_out_loss"] == pytest.approx(summary(one_process)["held_out_loss"], rel=1e-4)


def test_run_leaves_metrics_and_summary(one_process: Path) -> None:
    records = read_lines(one_process / "metrics.jsonl", StepRecord)
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert records[-1].loss < records[0].loss - 1.0
    assert all(record.grad_norm > 0 and record.tokens_per_s > 0 and record.peak_bytes > 0 for record in records)
    told = summary(one_process)
    assert [evaluation["step"] for evaluation in told["evaluations"]][:2] == [4, 8]


@pytest.mark.full
def test_pieces_of_words_can_be_the_tokens(run_ranks: RunRanks, text_file: Path, tmp_path: Path) -> None:
    run_ranks(2, train, {**OPTIONS, "tokenizer_type": "bpe", "data_path": str(text_file), "out": str(tmp_path)})
    told = summary(tmp_path)
    assert len(list(tmp_path.rglob("tokenizer.json"))) == 1
    assert told["held_out_loss"] < math.log(8192)


def test_folder_of_an_earlier_run_is_refused(run_ranks: RunRanks, one_process: Path, text_file: Path) -> None:
    with pytest.raises(Exception, match="holds an earlier run: give a new folder"):
        run_ranks(1, train, {**OPTIONS, "data_path": str(text_file), "out": str(one_process)})
