"""Evaluation in between, weights changed by hand, and exceptions: training goes on as on one process."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.conftest import RunRanks
from tests.support.case import STRATEGIES as ALL
from tests.support.case import Run, Scenario, Setting, check_strategies, each_half
from tests.support.zoo import FailingModel, ModelCase, Ordered, PlannedError, failing_at, vector_case

SHARDED = (Setting(3), Setting(2))
FAILING = vector_case(FailingModel)
ORDERED = vector_case(Ordered)


def _check(
    run_ranks: RunRanks, script: Callable[[Run], None], case: ModelCase, settings: tuple[Setting, ...] = SHARDED
) -> None:
    check_strategies(run_ranks, 2, Scenario(script, case), settings)


# ---- evaluation ----------------------------------------------------------------------------------------------------


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


def scale_local_weights_by_hand(run: Run) -> None:
    """What `torch.no_grad` code reaches through a DTensor's local part."""
    run.train(0)
    with torch.no_grad():
        for param in run.parameters().values():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.mul_(0.5)
    if run.sharded is not None:
        run.sharded.install_optimized_model_weights()
    run.train(1)


def scale_one_weight_after_evaluation(run: Run) -> None:
    """The weights were just gathered, and are still there."""
    run.train(0)
    with torch.no_grad():
        run.loss(1)
        run.parameters()["last.weight"].mul_(2.0)
        run.loss(1)
        run.parameters()["layers.3.up.weight"].mul_(2.0)
        run.loss(1)
    run.train(2)


@each_half(ALL, scale_weights_by_hand, scale_local_weights_by_hand, scale_one_weight_after_evaluation)
def test_weights_changed_by_hand_take_effect(
    run_ranks: RunRanks, script: Callable[[Run], None], settings: tuple[Setting, ...]
) -> None:
    _check(run_ranks, script, ORDERED, settings)


def load_state_between_steps(run: Run) -> None:
    saved = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    run.train(0, 1)
    run.model.load_state_dict(saved)
    run.train(2)


def test_loading_an_earlier_state_takes_effect(run_ranks: RunRanks) -> None:
    _check(run_ranks, load_state_between_steps, ORDERED, ALL)


# ---- exceptions ----------------------------------------------------------------------------------------------------


def _break(run: Run, index: int, position: int, where: str) -> None:
    with failing_at(run.module, position, where), pytest.raises(PlannedError, match=where):
        run.case.loss(run.model, run.batch(index)).backward()


def fail_in_forward_between_microbatches(run: Run) -> None:
    run.loss(0).backward()
    _break(run, 1, 1, "forward")
    run.train(2)


def _break_backward(run: Run, index: int, position: int) -> None:
    _break(run, index, position, "backward")
    if run.sharded is not None:
        run.sharded.reset()
    run.optimizer.zero_grad()


def fail_in_backward_between_microbatches(run: Run) -> None:
    run.loss(0).backward()
    _break_backward(run, 1, 1)
    run.loss(2).backward()
    with run.no_sync():
        run.loss(3).backward()
    run.train(4)


def fail_in_a_deferred_backward(run: Run) -> None:
    with run.no_sync():
        run.loss(0).backward()
        _break_backward(run, 1, 1)
        run.loss(2).backward()
    run.train(3)


@each_half(
    ALL,
    fail_in_forward_between_microbatches,
    fail_in_backward_between_microbatches,
    fail_in_a_deferred_backward,
)
def test_training_goes_on_after_an_exception(
    run_ranks: RunRanks, script: Callable[[Run], None], settings: tuple[Setting, ...]
) -> None:
    _check(run_ranks, script, FAILING, settings)
