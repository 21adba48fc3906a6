"""Clipping: torch's own function and the model's give the norm and the gradients of one process."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.errors import NonFiniteNormError
from tests.conftest import RunRanks
from tests.support.api_net import backward, batches, wrap
from tests.support.case import IN_TURN, REPLICATED, Run, Scenario, Setting, check_strategies, shard
from tests.support.on_ranks import on_ranks
from tests.support.zoo import MODEL_CASES

SMALL = 0.05
"""A norm that every gradient exceeds."""


def clip(run: Run, max_norm: float, norm_type: float, by_model: bool) -> torch.Tensor:
    """Clip by torch's function or (`by_model`) the model's own."""
    if by_model and run.sharded is not None:
        return run.sharded.clip_grad_norm_(max_norm, norm_type=norm_type)
    return nn.utils.clip_grad_norm_(run.model.parameters(), max_norm, norm_type=norm_type)


def clip_in_turn(norm_type: float, by_model: bool, run: Run) -> None:
    for step, max_norm in enumerate((SMALL, math.inf, SMALL)):
        run.loss(step).backward()
        run.note("norm", {"norm": clip(run, max_norm, norm_type, by_model)})
        run.step()


@pytest.mark.full(short=["2-True-3.5", "3-True-inf"])
@pytest.mark.parametrize(
    ("num_ranks", "by_model", "norm_type"), [(2, False, 2.0), (2, True, 3.5), (3, False, 1.0), (3, True, math.inf)]
)
def test_clipping_equals_one_process(run_ranks: RunRanks, num_ranks: int, by_model: bool, norm_type: float) -> None:
    """On 3 ranks some hold nothing of 2-row matrices and of scalars, and take part in the norm all the same."""
    script, settings = partial(clip_in_turn, norm_type, by_model), (Setting(0), Setting(3), REPLICATED, IN_TURN)
    if num_ranks == 2:
        check_strategies(run_ranks, 2, Scenario(script, MODEL_CASES["transformer"]), (Setting(1), Setting(2)))
    for turn, name in enumerate(("unused", "scalars") if num_ranks == 2 else ("odd_shapes", "scalars")):
        check_strategies(run_ranks, num_ranks, Scenario(script, MODEL_CASES[name]), settings[turn::2])


def clip_between_microbatches(run: Run) -> None:
    """The clipped gradient is what the next backward adds to."""
    for by_model in (False, True):
        run.loss(int(by_model)).backward()
        clip(run, SMALL, 2.0, by_model)
    run.train(2)


def test_backward_adds_to_clipped_gradients(run_ranks: RunRanks) -> None:
    scenario = Scenario(clip_between_microbatches, MODEL_CASES["odd_shapes"])
    check_strategies(run_ranks, 2, scenario, [Setting(strategy) for strategy in (1, 2)])


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(strategy: int) -> None:
    case = MODEL_CASES["scalars"]
    sharded, _ = shard(case, zero_dp_strategy=strategy)
    case.loss(sharded, case.make_batch(4, torch.Generator().manual_seed(0))).backward()
    good = sharded.clip_grad_norm_(math.inf, error_if_nonfinite=True).item()
    grad = dict(sharded.module.named_parameters())["temperature"].grad
    assert isinstance(grad, DTensor)
    grad.to_local().fill_(math.inf)
    before = sharded.full_gradients()
    with pytest.raises(
        NonFiniteNormError, match=r"^the total norm of order 2.0 of the gradients is inf, so they cannot"
    ):
        sharded.clip_grad_norm_(SMALL, error_if_nonfinite=True)
    after = sharded.full_gradients()
    assert all(torch.equal(before[name], grad) for name, grad in after.items() if grad is not None)  # type: ignore[arg-type]
    assert good > 0.0
    assert sharded.clip_grad_norm_(SMALL).item() == math.inf


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_gaps_between_gradients_count_for_nothing_even_after_nan(strategy: int) -> None:
    """Norms of the same gradients, before and after some that were NaN were clipped and zeroed in place."""
    model = wrap(strategy)
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
