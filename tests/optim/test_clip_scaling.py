"""Gradients whose norm is small enough are left alone; all others are scaled, NaN included."""

import math
from unittest import mock

import pytest
import torch

from megatron_fsdp.optim.grad_norm import is_known_to_be_one
from tests.conftest import RunRanks
from tests.optim.test_local_step import wrap
from tests.support.api_net import backward, batches, build
from tests.support.on_ranks import on_ranks


def scaled_by(relative_limit: float, poison: float) -> tuple[list[float], bool]:
    """How gradients are scaled by clipping to some multiple of their norm, and whether they were multiplied."""
    model = wrap(build, 3)
    backward(model, next(batches(1)))
    norm = model.clip_grad_norm_(math.inf).item()
    locals_ = [param.grad.to_local() for param in model.parameters()]  # type: ignore[union-attr]
    locals_ = [local for local in locals_ if local.numel()]
    if torch.distributed.get_rank() == 0:
        locals_[0].mul_(poison)
    before = [local.clone() for local in locals_]
    with mock.patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as multiply:
        model.clip_grad_norm_(norm * relative_limit)
    factors = [(local / old).flatten()[0].item() for local, old in zip(locals_, before, strict=True)]
    return factors, multiply.called


@pytest.mark.parametrize(("relative_limit", "factor"), [(2.0, 1.0), (0.999, 0.999)])
def test_gradients_are_scaled_where_their_norm_is_too_large(
    relative_limit: float, factor: float, run_ranks: RunRanks
) -> None:
    for factors, was_multiplied in run_ranks(2, scaled_by, relative_limit, 1.0):
        assert factors == pytest.approx([factor] * len(factors), rel=1e-4)
        assert was_multiplied == (factor < 1.0)


def test_a_norm_that_is_nan_scales_the_gradients_of_every_rank(run_ranks: RunRanks) -> None:
    for factors, was_multiplied in run_ranks(2, scaled_by, 2.0, math.nan):
        assert all(map(math.isnan, factors))
        assert was_multiplied


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_gaps_between_gradients_count_for_nothing_even_after_nan(strategy: int) -> None:
    """Norms of the same gradients, before and after some that were NaN were clipped and zeroed in place."""
    model = wrap(build, strategy)
    norms = []
    for factor in (1.0, float("nan"), 1.0):
        model.zero_grad(set_to_none=False)
        backward(model, next(batches(1)))
        with torch.no_grad():
            for param in model.parameters():
                param.grad.to_local().mul_(factor)  # type: ignore[union-attr]
        norms.append(model.clip_grad_norm_(1.0).item())
    first, nan, last = norms
    assert math.isnan(nan)
    assert first == last > 0.0


def test_what_cannot_be_read_without_a_wait_is_not_read() -> None:
    assert is_known_to_be_one(torch.ones(()))
    assert not is_known_to_be_one(torch.tensor(0.5))
    assert not is_known_to_be_one(torch.ones((), device="meta"))
