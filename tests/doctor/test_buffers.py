"""Buffers are compared on every rank; only batch norms' own statistics are excused."""

from functools import partial
from typing import Any

import pytest

from megatron_fsdp.doctor import ParityReport, check_parity
from tests.conftest import RunRanks
from tests.doctor import faults, models


def check(model_fn: Any, options: dict[str, Any]) -> ParityReport:
    options = {"loss_fn": models.square_loss, "checkpoint": False, "steps": 2, **options}
    return check_parity(model_fn, options.pop("batch", models.vectors), **options)


def test_buffers_that_every_rank_has_alike_pass(run_ranks: RunRanks) -> None:
    report = run_ranks(2, check, models.Counting, {"strategies": (3,), "microbatches": 2})[0]
    assert report.passed, report.summary()


@pytest.mark.full(short=["running_mean-rank 1"])
@pytest.mark.parametrize(("buffer", "wrong"), [("running_mean", "rank 1"), ("calls", "rank 1")])
def test_a_buffer_of_one_rank_is_named_whatever_it_is_called(run_ranks: RunRanks, buffer: str, wrong: str) -> None:
    shard_fn = partial(faults.buffer_of_rank_one, buffer=buffer)
    report = run_ranks(2, check, models.Counting, {"shard_fn": shard_fn})[0]
    (found,) = report.differences
    assert (found.where, found.step, found.name, found.also) == ("buffer", 2, buffer, ())
    assert f"is not the same on all ranks: on {wrong} it " in found.words
    assert (found.error, found.ratio) == (10.0, 6.0)


@pytest.mark.parametrize(("buffer", "passes"), [("1.running_mean", True), ("1.num_batches_tracked", False)])
def test_only_statistics_of_batch_norms_are_excused(run_ranks: RunRanks, buffer: str, passes: bool) -> None:
    shard_fn = partial(faults.buffer_of_rank_one, buffer=buffer)
    report = run_ranks(2, check, models.build_batch_norm, {"shard_fn": shard_fn, "microbatches": 2})[0]
    assert "running_mean and running_var differ between ranks and are not compared" in report.notes[0]
    assert [found.name for found in report.differences] == ([] if passes else [buffer])
