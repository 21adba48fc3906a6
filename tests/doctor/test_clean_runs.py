"""Right runs pass: every strategy, other ways to shard, tied, frozen, mixed and accumulating models."""

from typing import Any

import pytest

from megatron_fsdp.doctor import ParityReport, check_parity
from tests.conftest import RunRanks
from tests.doctor import faults, models

SQUARES: dict[str, Any] = {"batch": models.vectors, "loss_fn": models.square_loss}


def check(options: dict[str, Any]) -> ParityReport:
    options = {"model_fn": models.build, "batch": models.tokens, **options}
    return check_parity(options.pop("model_fn"), options.pop("batch"), **options)


def passed(run_ranks: RunRanks, num_ranks: int, **options: Any) -> ParityReport:
    report: ParityReport = run_ranks(num_ranks, check, options)[0]
    assert report.passed, report.summary()
    return report


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_strategy_passes(run_ranks: RunRanks, num_ranks: int) -> None:
    report = passed(run_ranks, num_ranks)
    assert [run.label for run in report.runs] == [
        "strategy 0 (no_shard)",
        "strategy 1 (optim)",
        "strategy 2 (optim_grads)",
        "strategy 3 (optim_grads_params)",
    ]
    assert [run.cells() for run in report.runs] == [["ok"] * 6] * 4
    assert (report.num_ranks, report.steps, report.part_allowed) == (num_ranks, 3, 1e-5)


def test_tied_frozen_and_unused_parameters_pass(run_ranks: RunRanks) -> None:
    report = passed(run_ranks, 2, model_fn=models.build_tied_frozen_and_unused, strategies=(0, 3), microbatches=2)
    (_,) = (note for note in report.notes if "got no gradient in one process: `spare.weight`, `spare.bias`; " in note)


def test_a_report_that_passed_says_what_it_cannot_see(run_ranks: RunRanks) -> None:
    report = passed(run_ranks, 2, model_fn=models.build_detached, **SQUARES, strategies=(3,), steps=1)
    hint, limits = report.diagnosis()
    assert hint == (
        "note: 2 trainable parameter(s) got no gradient in one process: `0.weight`, `0.bias`; they are unused, or cut "
        "off from the loss (by detach or no_grad)"
    )
    assert (
        limits == "note: sharding changes nothing; a fault of the model itself, which one process has too, is not seen"
    )


@pytest.mark.full(short=["in_buckets"])
@pytest.mark.parametrize("shard_fn", [faults.in_buckets, faults.by_torch_fsdp, faults.by_torch_ddp])
def test_other_ways_to_shard_pass(run_ranks: RunRanks, shard_fn: Any) -> None:
    report = passed(run_ranks, 2, shard_fn=shard_fn)
    assert [run.label for run in report.runs] == [shard_fn.__name__]


def test_bfloat16_passes_within_its_own_tolerance(run_ranks: RunRanks) -> None:
    report = passed(run_ranks, 2, model_fn=models.build_bfloat16, strategies=(3,))
    assert report.part_allowed == 3e-2


def test_batch_normalisation_is_compared_slice_by_slice(run_ranks: RunRanks) -> None:
    report = passed(run_ranks, 2, model_fn=models.build_batch_norm, **SQUARES, strategies=(0, 3))
    assert "each rank normalises by its own samples" in report.notes[0]


@pytest.mark.full
def test_a_summed_loss_passes_where_gradients_are_summed(run_ranks: RunRanks) -> None:
    summed = {"batch": models.vectors, "loss_fn": models.summed_loss, "shard_fn": faults.summed, "reduction": "sum"}
    passed(run_ranks, 3, model_fn=models.build_linear, **summed)


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [0, 3])
def test_a_gradient_that_is_zero_but_for_rounding_passes(run_ranks: RunRanks, strategy: int) -> None:
    options = {"model_fn": models.KeyBias, "batch": models.pairs, "loss_fn": models.attention_loss}
    passed(run_ranks, 3, **options, strategies=(strategy,), microbatches=2, checkpoint=False)
