"""What is wrong with a model or its loss is not blamed on sharding."""

from typing import Any

import pytest
import torch

from megatron_fsdp.doctor import ParityReport, check_parity
from megatron_fsdp.doctor.reference import Tolerance
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.doctor import faults, models

SQUARED = {"loss_fn": models.square_loss}


def check(model_fn: Any, options: dict[str, Any]) -> ParityReport:
    options = {"strategies": (3,), "steps": 1, "checkpoint": False, "batch": models.vectors, **options}
    return check_parity(model_fn, options.pop("batch"), **options)


def test_values_of_one_process_that_are_not_finite_are_told_as_such(run_ranks: RunRanks) -> None:
    half = run_ranks(2, check, models.build_half, {"loss_fn": models.half_loss})[0]
    assert "the weight of `0.weight` in step 1 is not finite in one process already (float16 ends" in half.summary()
    overflow = run_ranks(2, check, models.OverflowGradient, {})[0]
    assert "the gradient of `weight` in step 1 is not finite in one process already, and" in overflow.summary()
    for report in (half, overflow):
        assert (report.judged, report.runs, len(report.findings)) == (False, (), 1)


def test_batches_from_torchs_own_generator_are_made_once(run_ranks: RunRanks) -> None:
    options = {"batch": models.drawn_tokens, "steps": 2, "checkpoint": True}
    report = run_ranks(2, check, models.build, options)[0]
    assert report.passed, report.summary()
    assert report.runs[0].cells() == ["ok"] * 6


def refusal(model_fn: Any, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        check(model_fn, options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("model_fn", "words"),
    [
        (models.build_dropout, "it draws random numbers (dropout) or is not deterministic. Sharding was not judged: "),
        (models.build_random, "model_fn gives `weight` other values each time, though torch.manual_seed is called"),
    ],
)
def test_models_that_nothing_can_be_compared_with_are_named(run_ranks: RunRanks, model_fn: Any, words: str) -> None:
    report = run_ranks(2, check, model_fn, {"loss_fn": models.square_loss})[0]
    (found,) = report.differences
    assert (found.where, found.kind, report.runs) == ("one process against itself", "not repeatable", ())
    assert words in found.words
    assert (report.passed, report.judged, report.verdict) == (False, False, "NOT JUDGED")


def test_a_summed_loss_is_named_and_sharding_is_right(run_ranks: RunRanks) -> None:
    report = run_ranks(3, check, models.build_linear, {"loss_fn": models.summed_loss})[0]
    (found,) = report.differences
    assert (found.where, found.kind) == ("loss", "not a mean")
    assert "the loss is a sum over samples, not a mean" in found.words
    assert "come out as 1/3 of what they should be" in found.words
    assert report.runs[0].cells() == ["ok"] * 5 + ["-"]


def test_a_planted_fault_is_found_beside_a_loss_that_is_no_mean(run_ranks: RunRanks) -> None:
    options = {"loss_fn": models.summed_loss, "shard_fn": faults.summed}
    report = run_ranks(2, check, models.build_linear, options)[0]
    assert [difference.where for difference in report.differences[:2]] == ["loss", "gradient"]
    assert report.differences[1].ratio == pytest.approx(2.0, rel=1e-5)
    assert (report.judged, report.verdict) == (True, "DIFFERS")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": models.odd_vectors}, "a batch of 11 samples does not divide into 1 microbatch"),
        ({"batch": models.uneven_batch}, "is samples, and these differ: ['x'] 12, ['weight'] 3"),
        ({}, "the model gave a tensor of shape (12, 3) where the loss is wanted; give loss_fn"),
        ({"shard_fn": faults.only_the_model, **SQUARED}, "shard_fn gave MegatronFSDP; it has to give (model, optim"),
        ({"batch": models.moody_tokens}, "batch(1) gives other samples each time"),
        ({"batch": models.moody_batch}, "batch gives rank(s) 1 other samples than rank 0"),
        ({"steps": 0}, "steps is 0; give a whole number from 1"),
        ({"optimizer_fn": "tests.doctor.models:nothing"}, "'tests.doctor.models' has no 'nothing'"),
    ],
)
def test_what_cannot_be_run_is_refused_on_every_rank(run_ranks: RunRanks, options: Any, message: str) -> None:
    texts = run_ranks(2, refusal, models.build_linear, options)
    assert texts[0] == texts[1]
    assert message in texts[0]


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
