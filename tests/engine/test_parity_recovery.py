"""Evaluation in between, weights changed by hand, and exceptions: training goes on as on one process."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from tests.conftest import RunRanks
from tests.support.case import EVERY_WAY as ALL
from tests.support.case import IN_TURN, STRATEGIES, Run, Scenario, Setting, check_strategies, each_half, three_steps
from tests.support.on_ranks import assert_equal_tensors, of_ranks, on_ranks
from tests.support.zoo import (
    FailingModel,
    ModelCase,
    Ordered,
    PlannedError,
    failing_at,
    vector_case,
)

SHARDED = (Setting(3), Setting(2))
FAILING = vector_case(FailingModel)
ORDERED = vector_case(Ordered)


def _check(
    run_ranks: RunRanks, script: Callable[[Run], None], case: ModelCase, settings: tuple[Setting, ...] = SHARDED
) -> None:
    check_strategies(run_ranks, 2, Scenario(script, case), settings)


def _evaluate(run: Run, index: int) -> None:
    run.model.eval()
    run.loss(index)
    run.model.train()


def evaluate_between_microbatches(run: Run) -> None:
    for step in range(2):
        run.loss(3 * step).backward()
        with torch.no_grad():
            _evaluate(run, 50 + step)
        with run.no_sync():
            run.loss(3 * step + 1).backward()
        with torch.no_grad():
            _evaluate(run, 60 + step)
        run.train(3 * step + 2)


def evaluate_between_forward_and_backward(run: Run) -> None:
    for step in range(2):
        loss = run.loss(step)
        with torch.no_grad():
            _evaluate(run, 50 + step)
        loss.backward()
        run.step()


def infer_first(run: Run) -> None:
    """Inference tensors must not leak into training."""
    with torch.inference_mode():
        _evaluate(run, 50)
    run.train(0)
    with torch.inference_mode():
        _evaluate(run, 51)
    run.loss(1).backward()
    with torch.inference_mode():
        _evaluate(run, 52)
    run.train(2)
    with torch.inference_mode():
        _evaluate(run, 53)


@each_half(ALL, evaluate_between_microbatches, evaluate_between_forward_and_backward, infer_first)
def test_evaluation_at_any_time_leaves_training_alone(
    run_ranks: RunRanks, script: Callable[[Run], None], settings: tuple[Setting, ...]
) -> None:
    _check(run_ranks, script, ORDERED, settings)


# ---- weights changed by hand ---------------------------------------------------------------------------------------


def scale_weights_by_hand(run: Run) -> None:
    run.train(0)
    with torch.no_grad():
        for param in run.parameters().values():
            param.mul_(0.5)
    run.train(1)
    with torch.no_grad():
        for param in run.parameters().values():
            param.add_(param, alpha=0.25)
    run.loss(2)
    run.note_parameters()


@each_half(ALL)
def test_weights_changed_by_hand_take_effect(run_ranks: RunRanks, settings: tuple[Setting, ...]) -> None:
    _check(run_ranks, scale_weights_by_hand, ORDERED, settings)


def load_state_between_steps(run: Run) -> None:
    saved = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    run.train(0, 1)
    run.model.load_state_dict(saved)
    run.train(2)


def test_loading_an_earlier_state_takes_effect(run_ranks: RunRanks) -> None:
    _check(run_ranks, load_state_between_steps, ORDERED, ALL[1::2])


# ---- exceptions ----------------------------------------------------------------------------------------------------


def _break(run: Run, index: int, position: int, where: str) -> None:
    with failing_at(run.module, position, where), pytest.raises(PlannedError, match=where):
        run.case.loss(run.model, run.batch(index)).backward()


def fail_in_forward_between_microbatches(run: Run) -> None:
    run.loss(0).backward()
    _break(run, 1, 1, "forward")
    run.train(2)


def drop_batch(run: Run, index: int, position: int, point: str) -> None:
    """A batch that fails, and what a careful loop does then."""
    _break(run, index, position, point)
    if run.sharded is not None:
        run.sharded.reset()
        assert run.sharded.is_param_fsdp_distributed
    run.optimizer.zero_grad()


def fail_in_a_deferred_backward(run: Run) -> None:
    with run.no_sync():
        run.loss(0).backward()
        drop_batch(run, 1, 1, "backward")
        run.loss(2).backward()
    run.train(3)


# ---- exceptions at any point -----------------------------------------------------------------------------------------


LAYERS = 3
POINTS = (
    "earlier forward pre-hook",  # runs before anything of the unit
    "forward pre-hook",
    "forward",
    "forward hook",
    "backward of the output",  # the first that backward meets of the unit
    "backward",
    "backward of a parameter",
    "backward of the input",  # the last
)


class HalfwaySGD(Optimizer):
    """Gradient descent that raises after a number of parameters where it is told to."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.fails_after: int | None = None

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        """Update one parameter after another."""
        for group in self.param_groups:
            for position, param in enumerate(group["params"]):
                if position == self.fails_after:
                    raise PlannedError("step")
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])


SETTINGS = [*STRATEGIES, Setting(3, options=(("weight_allocator", "resize"),)), IN_TURN]


def fail_everywhere(run: Run, positions: tuple[int, ...]) -> None:
    run.train(0)
    for position in positions:
        for number, point in enumerate(POINTS):
            drop_batch(run, 100 + number, position, point)
            run.train(*range(1 + 3 * number, 4 + 3 * number) if number % 4 == 3 else (1 + 3 * number,))


def fail_in_the_middle(run: Run) -> None:
    fail_everywhere(run, (1,))


def fail_in_the_first_unit(run: Run) -> None:
    fail_everywhere(run, (0,))


def fail_at_once(run: Run) -> None:
    """Before anything was recorded or agreed on."""
    drop_batch(run, 100, 1, "backward")
    run.train(0, 1, 2)


def fail_in_the_second_microbatch(run: Run) -> None:
    run.train(0)
    for point in ("forward", "backward", "backward of the input"):
        run.loss(1).backward()
        drop_batch(run, 2, 1, point)
        with run.no_sync():
            run.loss(3).backward()
        drop_batch(run, 4, 0, point)
        with run.no_sync():
            run.loss(5).backward()
        run.train(6)
    run.train(7, 8, 9)


@pytest.mark.full(short=["fail_in_the_middle-settings0"])
@pytest.mark.parametrize(
    ("script", "settings"),
    [
        (fail_in_the_middle, SETTINGS[3:]),
        (fail_in_the_first_unit, SETTINGS[:3]),
        (fail_at_once, SETTINGS[3:]),
        (fail_in_the_second_microbatch, SETTINGS[:3]),
    ],
)
def test_training_goes_on_as_if_the_batch_had_never_been(
    run_ranks: RunRanks, script: Any, settings: list[Setting]
) -> None:
    check_strategies(run_ranks, 2, Scenario(script, FAILING), settings)


def halfway_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return HalfwaySGD(model.parameters(), lr=0.1)


def fail_in_the_optimizer(run: Run) -> None:
    """Half of the parameters are new and half old, as on one process."""
    run.train(0)
    for fails_after in (0, 5, 11):
        run.loss(1).backward()
        run.optimizer.fails_after = fails_after  # type: ignore[attr-defined]
        with pytest.raises(PlannedError, match="step"):
            run.optimizer.step()
        run.optimizer.fails_after = None  # type: ignore[attr-defined]
        if run.sharded is not None:
            run.sharded.reset()
        run.optimizer.zero_grad()
        run.note_parameters()
        run.train(2, 3, 4)


@pytest.mark.full(short=["settings0"])
@pytest.mark.parametrize("settings", [SETTINGS[1:4:2], SETTINGS[::2]])
def test_a_step_that_broke_off_leaves_what_it_leaves_on_one_process(
    run_ranks: RunRanks, settings: list[Setting]
) -> None:
    check_strategies(run_ranks, 2, Scenario(fail_in_the_optimizer, FAILING, halfway_sgd), settings)


# ---- sums of earlier microbatches ------------------------------------------------------------------------------------


def sums_survive(run: Run, by_no_sync: bool) -> None:
    """Without clearing: what a failed forward finds is still there, whichever way it was deferred."""
    if run.sharded is not None:
        run.sharded.set_model_auto_sync(by_no_sync)
    with run.no_sync() if by_no_sync else contextlib.nullcontext():
        run.backward(0)
        _break(run, 1, 1, "forward")
    if run.sharded is not None:
        run.sharded.reset()
        run.sharded.set_model_auto_sync()
    run.train(2)


@pytest.mark.parametrize("by_no_sync", [True, False])
def test_sums_of_earlier_microbatches_survive_a_failed_forward(run_ranks: RunRanks, by_no_sync: bool) -> None:
    check_strategies(run_ranks, 2, Scenario(partial(sums_survive, by_no_sync=by_no_sync), FAILING), STRATEGIES[1::2])


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_ranks_that_failed_at_different_points_reduce_alike_afterwards(strategy: int) -> None:
    """The failed microbatch may have left a part of its gradients, as on one process; nobody hangs."""
    options = () if strategy == 0 else (("max_gathered_units", LAYERS),)  # no gather that one rank alone would begin
    run = Run(Scenario(three_steps, FAILING), Setting(strategy, options=options))
    assert run.sharded is not None
    with run.no_sync():
        run.backward(0)
        _break(run, 1, dist.get_rank(), "backward of the output")
    run.sharded.reset()
    run.backward(2)
    first, second = of_ranks(run.sharded.full_gradients())
    assert all(grad is not None for grad in first.values())
    assert_equal_tensors(first, second)
