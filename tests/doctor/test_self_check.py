"""What is wrong with a model or its loss is not blamed on sharding."""

from typing import Any

import pytest
import torch

from megatron_fsdp.doctor import ParityReport, check_parity
from megatron_fsdp.doctor.reference import Tolerance
from megatron_fsdp.errors import ConfigurationError
from tests.doctor import faults, models
from tests.support.on_ranks import on_ranks, refusal

ONCE: dict[str, Any] = {"strategies": (3,), "batch": models.vectors, **models.BARE}


def check(model_fn: Any, **options: Any) -> ParityReport:
    return models.check({**ONCE, "model_fn": model_fn, **options})


@on_ranks(2)
def test_values_of_one_process_that_are_not_finite_are_told_as_such() -> None:
    half = check(models.build_half, loss_fn=models.half_loss)
    assert "the weight of `0.weight` in step 1 is not finite in one process already (float16 ends" in half.summary()
    overflow = check(models.OverflowGradient)
    assert "the gradient of `weight` in step 1 is not finite in one process already, and" in overflow.summary()
    for report in (half, overflow):
        assert (report.judged, report.runs, len(report.findings)) == (False, (), 1)


@on_ranks(2)
def test_batches_from_torchs_own_generator_are_made_once() -> None:
    options = {"batch": models.drawn_tokens, "steps": 2, "checkpoint": True}
    report = check(models.build, **options)
    assert report.passed, report.summary()
    assert report.runs[0].cells() == ["ok"] * 6


@pytest.mark.parametrize(
    ("model_fn", "words"),
    [
        (models.build_dropout, "it draws random numbers (dropout) or is not deterministic. Sharding was not judged: "),
        (models.build_random, "model_fn gives `weight` other values each time, though torch.manual_seed is called"),
    ],
)
@on_ranks(2)
def test_models_that_nothing_can_be_compared_with_are_named(model_fn: Any, words: str) -> None:
    report = check(model_fn, loss_fn=models.square_loss)
    (found,) = report.differences
    assert (found.where, found.kind, report.runs) == ("one process against itself", "not repeatable", ())
    assert words in found.words
    assert (report.passed, report.judged, report.verdict) == (False, False, "NOT JUDGED")


@on_ranks(3)
def test_a_summed_loss_is_named_and_sharding_is_right() -> None:
    report = check(models.build_linear, loss_fn=models.summed_loss)
    (found,) = report.differences
    assert (found.where, found.kind) == ("loss", "not a mean")
    assert "the loss is a sum over samples, not a mean" in found.words
    assert "come out as 1/3 of what they should be" in found.words
    assert report.runs[0].cells() == ["ok"] * 5 + ["-"]


@on_ranks(2)
def test_a_planted_fault_is_found_beside_a_loss_that_is_no_mean() -> None:
    options = {"loss_fn": models.summed_loss, "shard_fn": faults.summed}
    report = check(models.build_linear, **options)
    assert [difference.where for difference in report.differences[:2]] == ["loss", "gradient"]
    assert report.differences[1].ratio == pytest.approx(2.0, rel=1e-5)
    assert (report.judged, report.verdict) == (True, "DIFFERS")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": models.odd_vectors}, "a batch of 11 samples does not divide into 1 microbatch"),
        ({"batch": models.uneven_batch}, "is samples, and these differ: ['x'] 12, ['weight'] 3"),
        ({}, "the model gave a tensor of shape (12, 3) where the loss is wanted; give loss_fn"),
        (
            {"shard_fn": faults.only_the_model, "loss_fn": models.square_loss},
            "shard_fn gave MegatronFSDP; it has to give (model, optim",
        ),
        ({"batch": models.moody_tokens}, "batch(1) gives other samples each time"),
        ({"batch": models.moody_batch}, "batch gives rank(s) 1 other samples than rank 0"),
        ({"steps": 0}, "steps is 0; give a whole number from 1"),
        ({"optimizer_fn": "tests.doctor.models:nothing"}, "'tests.doctor.models' has no 'nothing'"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_run_is_refused_on_every_rank(options: Any, message: str) -> None:
    assert message in refusal(check, models.build_linear, error=ConfigurationError, **options)


def test_arguments_are_refused_before_ranks_are_started() -> None:
    with pytest.raises(ConfigurationError, match="ranks is 0"):
        check_parity(models.build, models.tokens, ranks=0)
    with pytest.raises(ConfigurationError, match=r"give functions of a module \(not lambdas"):
        check_parity(lambda: models.build(), models.tokens)
    with pytest.raises(ConfigurationError, match="device is 'npu'"):
        check_parity(models.build, models.tokens, device="npu")


# ---- what rounding may move, and what is more ------------------------------------------------------------------------


FP32 = Tolerance(1e-5)


def test_rounding_is_no_difference_and_more_is_one() -> None:
    right = torch.linspace(-1, 1, 20)
    assert FP32.agrees(right, right * (1 + 1e-6))
    off = right.double()
    off[7] += 2.5e-5
    assert FP32.differing(right, off).nonzero().flatten().tolist() == [7]


def test_the_floor_hides_rounding_and_no_factor_of_a_small_tensor() -> None:
    large = torch.tensor([1.0, -3.0])
    allowed = FP32.among([large, torch.tensor([1e-4])])
    assert allowed.floor == pytest.approx(3e-6)
    assert allowed.agrees(torch.tensor([1e-9]), torch.tensor([-2e-6]))
    assert not allowed.agrees(torch.tensor([3e-4]), torch.tensor([6e-4]))
    assert allowed.at_step(2).floor == pytest.approx(1.2e-5)
