"""Accumulation over microbatches: every way to defer, to clear and to scale equals one process."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.conftest import RunRanks
from tests.support.models import MODEL_CASES, ModelName
from tests.support.sharded_run import STRATEGIES as ALL
from tests.support.sharded_run import Run, Scenario, Setting, check_strategies, each_half, sgd

MANUAL = tuple(Setting(strategy, auto_sync=False) for strategy in range(4))

Clear = Callable[[Run], None]


def _check(
    run_ranks: RunRanks,
    script: Callable[[Run], None],
    settings: tuple[Setting, ...] = ALL,
    model: ModelName = "unused",
    num_ranks: int = 2,
) -> None:
    check_strategies(run_ranks, num_ranks, Scenario(script, MODEL_CASES[model], sgd), settings)


# ---- deferring -----------------------------------------------------------------------------------------------------


def defer_on_top_of_visible_gradients(run: Run) -> None:
    run.loss(0).backward()
    with run.no_sync():
        run.loss(1).backward()
    run.train(2)


def defer_forwards_only_half_way(run: Run) -> None:
    """The forward inside, the backward outside of `no_sync`, and the other way round."""
    with run.no_sync():
        inside = run.loss(0)
    inside.backward()
    outside = run.loss(1)
    with run.no_sync():
        outside.backward()
    run.train(2)


def test_it_is_the_backward_that_no_sync_defers(run_ranks: RunRanks) -> None:
    _check(run_ranks, defer_forwards_only_half_way)


def say_which_is_last(run: Run) -> None:
    if run.sharded is not None:
        run.sharded.set_model_auto_sync(False)
    for step in range(2):
        for microbatch in range(3):
            if run.sharded is not None:
                run.sharded.is_last_microbatch = microbatch == 2
            run.loss(10 * step + microbatch).backward()
        run.step()


def finish_by_hand(run: Run) -> None:
    for step in range(2):
        for microbatch in range(2):
            run.loss(10 * step + microbatch).backward()
        if run.sharded is not None:
            run.sharded.finish_grad_sync()
        run.step()


# ---- clearing ------------------------------------------------------------------------------------------------------


def zero_optimizer(run: Run) -> None:
    run.optimizer.zero_grad()


def zero_model(run: Run) -> None:
    run.model.zero_grad()


def zero_optimizer_in_place(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def zero_model_in_place(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)


def none_by_hand(run: Run) -> None:
    for param in run.parameters().values():
        param.grad = None


def _clear_and_go_on(run: Run, clear: Clear) -> None:
    run.loss(0).backward()
    clear(run)
    run.note_gradients("cleared")
    run.loss(1).backward()
    run.note_gradients()
    run.optimizer.step()
    clear(run)
    run.loss(2).backward()
    run.train(3)


def clear_by_optimizer(run: Run) -> None:
    _clear_and_go_on(run, zero_optimizer)


def clear_by_model(run: Run) -> None:
    _clear_and_go_on(run, zero_model)


def clear_by_optimizer_in_place(run: Run) -> None:
    _clear_and_go_on(run, zero_optimizer_in_place)


def clear_by_model_in_place(run: Run) -> None:
    _clear_and_go_on(run, zero_model_in_place)


def clear_by_hand(run: Run) -> None:
    _clear_and_go_on(run, none_by_hand)


@each_half(ALL, clear_by_optimizer, clear_by_model, clear_by_optimizer_in_place, clear_by_model_in_place, clear_by_hand)
def test_every_way_to_clear_gradients_clears_them(
    run_ranks: RunRanks, script: Callable[[Run], None], settings: tuple[Setting, ...]
) -> None:
    _check(run_ranks, script, settings)


def _clear_deferred(run: Run, clear: Clear) -> None:
    with run.no_sync():
        run.loss(0).backward()
        clear(run)
        run.loss(1).backward()
    run.loss(2).backward()
    run.note_gradients()
    with run.no_sync():
        run.loss(3).backward()
    clear(run)
    run.train(4)


def clear_deferred_by_optimizer(run: Run) -> None:
    _clear_deferred(run, zero_optimizer)


def clear_deferred_by_model(run: Run) -> None:
    _clear_deferred(run, zero_model)


def clear_deferred_by_optimizer_in_place(run: Run) -> None:
    _clear_deferred(run, zero_optimizer_in_place)


@each_half(ALL, clear_deferred_by_optimizer, clear_deferred_by_model, clear_deferred_by_optimizer_in_place)
def test_clearing_forgets_what_was_deferred(
    run_ranks: RunRanks, script: Callable[[Run], None], settings: tuple[Setting, ...]
) -> None:
    _check(run_ranks, script, settings, model="odd_shapes")


def clear_before_any_sync(run: Run) -> None:
    """Without auto sync nothing is visible yet, but strategies 2 and 3 have reduced already."""
    run.loss(0).backward()
    run.optimizer.zero_grad()
    run.loss(1).backward()
    run.model.zero_grad()
    run.loss(2).backward()
    run.optimizer.step()
    run.note_gradients()
    run.note_parameters()


def test_clearing_forgets_what_was_reduced_but_not_shown(run_ranks: RunRanks) -> None:
    _check(run_ranks, clear_before_any_sync, MANUAL)


def clear_one_parameter(run: Run) -> None:
    run.loss(0).backward()
    run.parameters()["0.used.weight"].grad = None
    run.train(1)


def test_clearing_one_gradient_leaves_its_neighbours(run_ranks: RunRanks) -> None:
    _check(run_ranks, clear_one_parameter)


# ---- changing ------------------------------------------------------------------------------------------------------


def scale_between_microbatches(run: Run) -> None:
    run.loss(0).backward()
    for param in run.parameters().values():
        if param.grad is not None:
            param.grad.mul_(0.5)
    run.train(1)


def replace_between_microbatches(run: Run) -> None:
    run.loss(0).backward()
    for param in run.parameters().values():
        if param.grad is not None:
            param.grad = param.grad * 3.0
    run.train(1)


def scale_below_deferred_sums(run: Run) -> None:
    run.loss(0).backward()
    with torch.no_grad():
        for param in run.parameters().values():
            if param.grad is not None:
                param.grad.div_(4.0)
    with run.no_sync():
        run.loss(1).backward()
    run.train(2)


@each_half(ALL, scale_between_microbatches, replace_between_microbatches, scale_below_deferred_sums)
def test_what_the_user_does_to_gradients_counts(
    run_ranks: RunRanks, script: Callable[[Run], None], settings: tuple[Setting, ...]
) -> None:
    _check(run_ranks, script, settings)


def scale_all(run: Run) -> None:
    """`scale_gradients` reaches visible and deferred gradients alike."""
    run.loss(0).backward()
    with run.no_sync():
        run.loss(1).backward()
    run.scale(0.5)
    run.train(2)


def test_scale_gradients_reaches_deferred_sums(run_ranks: RunRanks) -> None:
    _check(run_ranks, scale_all)


# ---- two optimizers ------------------------------------------------------------------------------------------------


def first_block(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for name, p in model.named_parameters() if name.removeprefix("module.")[0] == "0"], lr=0.1
    )


def _all_but_thefirst_block(model: nn.Module) -> torch.optim.Optimizer:
    others = [p for name, p in model.named_parameters() if name.removeprefix("module.")[0] != "0"]
    return torch.optim.SGD(others, lr=0.05, momentum=0.9)


def train_with_two_optimizers(run: Run) -> None:
    second = run.add_optimizer(_all_but_thefirst_block)
    run.loss(0).backward()
    run.optimizer.zero_grad()
    run.note_gradients("first zeroed")
    run.loss(1).backward()
    run.note_gradients("first has one, second two")
    run.optimizer.step()
    second.zero_grad()
    run.loss(2).backward()
    second.step()
    run.note_gradients("first has two, second one")
    run.note_parameters()


def defer_with_two_optimizers(run: Run) -> None:
    second = run.add_optimizer(_all_but_thefirst_block)
    with run.no_sync():
        run.loss(0).backward()
        second.zero_grad()
        run.loss(1).backward()
        run.optimizer.zero_grad()
    run.loss(2).backward()
    run.note_gradients("first has one, second two")
    run.optimizer.step()
    second.step()
    run.note_parameters()


@pytest.mark.parametrize("script", [train_with_two_optimizers, defer_with_two_optimizers])
def test_zeroing_one_optimizer_leaves_the_gradients_of_the_other(
    run_ranks: RunRanks, script: Callable[[Run], None]
) -> None:
    settings = tuple(Setting(strategy, one_call=False) for strategy in range(4))
    check_strategies(run_ranks, 2, Scenario(script, MODEL_CASES["odd_shapes"], first_block), settings)
