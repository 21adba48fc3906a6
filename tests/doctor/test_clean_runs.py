"""Right runs pass: every strategy, other ways to shard, tied, frozen, mixed and accumulating models."""

from typing import Any

import pytest

from megatron_fsdp.doctor import ParityReport
from tests.doctor import faults, models
from tests.support.on_ranks import on_ranks


def passed(**options: Any) -> ParityReport:
    report = models.check(options)
    assert report.passed, report.summary()
    return report


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_every_strategy_passes(num_ranks: int) -> None:
    report = passed()
    assert [run.label for run in report.runs] == [
        "strategy 0 (no_shard)",
        "strategy 1 (optim)",
        "strategy 2 (optim_grads)",
        "strategy 3 (optim_grads_params)",
    ]
    assert [run.cells() for run in report.runs] == [["ok"] * 6] * 4
    assert (report.num_ranks, report.steps, report.part_allowed) == (num_ranks, 3, 1e-5)


@on_ranks(2)
def test_tied_frozen_and_unused_parameters_pass() -> None:
    report = passed(model_fn=models.build_tied_frozen_and_unused, strategies=(0, 3), microbatches=2)
    (_,) = (note for note in report.notes if "got no gradient in one process: `spare.weight`, `spare.bias`; " in note)


@on_ranks(2)
def test_a_report_that_passed_says_what_it_cannot_see() -> None:
    report = passed(model_fn=models.build_detached, **models.SQUARES, strategies=(3,), steps=1)
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
@on_ranks(2)
def test_other_ways_to_shard_pass(shard_fn: Any) -> None:
    report = passed(shard_fn=shard_fn)
    assert [run.label for run in report.runs] == [shard_fn.__name__]


@on_ranks(2)
def test_bfloat16_passes_within_its_own_tolerance() -> None:
    report = passed(model_fn=models.build_bfloat16, strategies=(3,))
    assert report.part_allowed == 3e-2


@on_ranks(2)
def test_batch_normalisation_is_compared_slice_by_slice() -> None:
    report = passed(model_fn=models.build_batch_norm, **models.SQUARES, strategies=(0, 3))
    assert "each rank normalises by its own samples" in report.notes[0]


@pytest.mark.full
@on_ranks(3)
def test_a_summed_loss_passes_where_gradients_are_summed() -> None:
    summed = {"batch": models.vectors, "loss_fn": models.summed_loss, "shard_fn": faults.summed, "reduction": "sum"}
    passed(model_fn=models.build_linear, **summed)


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(3)
def test_a_gradient_that_is_zero_but_for_rounding_passes(strategy: int) -> None:
    options = {"model_fn": models.KeyBias, "batch": models.pairs, "loss_fn": models.attention_loss}
    passed(**options, strategies=(strategy,), microbatches=2, checkpoint=False)
