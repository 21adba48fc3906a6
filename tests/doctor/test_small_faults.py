"""Faults smaller than weights are told, and rounding is not taken for a fault."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp.doctor import ParityReport, check_parity
from megatron_fsdp.doctor.diagnose import Context, Tolerance, diagnose, tell_ratio
from tests.conftest import RunRanks
from tests.doctor import faults, patients

FP32 = Tolerance(1e-5)


def check(options: dict[str, Any]) -> ParityReport:
    options = {"model_fn": patients.build, "batch": patients.tokens, "checkpoint": False, "steps": 2, **options}
    return check_parity(options.pop("model_fn"), options.pop("batch"), **options)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize(("rate", "decay"), [(1e-3, 0.01), (1e-4, 0.1)])
@pytest.mark.parametrize("times", [0, 2])
def test_a_wrong_weight_decay_is_found_in_the_updates(
    run_ranks: RunRanks, rate: float, decay: float, times: int
) -> None:
    optimizer_fn = partial(faults.adamw_with_decay, rate=rate, decay=decay)
    shard_fn = partial(faults.decays, rate=rate, decay=decay * times)
    found = run_ranks(2, check, {"optimizer_fn": optimizer_fn, "shard_fn": shard_fn})[0].differences[0]
    assert (found.where, found.step, found.name) == ("weight", 1, "embed.weight")
    assert found.words.startswith("has an update that ")
    assert found.error > found.allowed


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [0, 3])
def test_a_gradient_that_is_zero_but_for_rounding_passes(run_ranks: RunRanks, strategy: int) -> None:
    options = {"model_fn": patients.build_key_bias, "batch": patients.pairs, "loss_fn": patients.attention_loss}
    report = run_ranks(3, check, {**options, "strategies": (strategy,), "microbatches": 2, "steps": 3})[0]
    assert report.passed, report.told()


def test_rounding_to_bfloat16_is_named(run_ranks: RunRanks) -> None:
    shard_fn = partial(faults.by_hand, name=faults.UP, change=faults.through_bfloat16)
    found = run_ranks(2, check, {"shard_fn": shard_fn})[0].differences[0]
    assert (found.where, found.name, found.kind) == ("gradient", faults.UP, "rounded")
    assert found.words == "is right, but rounded as bfloat16 would (communicated or kept in a coarser dtype)"


def check_in_float32() -> ParityReport:
    with pytest.warns(UserWarning, match=r"compute in torch\.float64 and are optimised in torch\.float32"):
        return check({"model_fn": patients.build_double, "strategies": (3,), "steps": 1})


def test_a_float64_model_that_is_kept_in_float32_is_told_so(run_ranks: RunRanks) -> None:
    found = run_ranks(2, check_in_float32)[0].differences[0]
    assert (found.where, found.kind) == ("gradient", "rounded")
    assert "rounded as float32 would (kept in float32 by main_params_dtype" in found.words


def test_the_floor_hides_rounding_and_no_factor_of_a_small_tensor() -> None:
    large = torch.tensor([1.0, -3.0])
    allowed = FP32.among([large, None, torch.tensor([1e-4])])
    assert allowed.floor == pytest.approx(3e-6)
    assert allowed.agrees(torch.tensor([1e-9]), torch.tensor([-2e-6]))
    assert not allowed.agrees(torch.tensor([3e-4]), torch.tensor([6e-4]))
    assert allowed.at_step(2).floor == pytest.approx(1.2e-5)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")]
)
def test_rounding_is_named_by_its_dtype(dtype: torch.dtype, name: str) -> None:
    right = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told = diagnose(right, right.to(dtype), Context(2, what="value"), Tolerance(1e-10))
    assert told.kind == "rounded"
    assert f"rounded as {name} would" in told.words
    mean: Tensor = torch.stack([(right * k).to(dtype).double() / k for k in (1.7, 0.6)]).mean(0)
    assert f"as {name}" in diagnose(right, mean, Context(2), Tolerance(1e-10)).words
    assert diagnose(right, mean, Context(2, what="value"), Tolerance(1e-10)).kind == "unknown"


def test_no_ratio_is_told_as_one() -> None:
    assert tell_ratio(1 + 1e-5, 2, 1) == "1 + 1e-05 times what it should be"
    assert tell_ratio(1 - 2e-6, 2, 1) == "1 - 2e-06 times what it should be"
