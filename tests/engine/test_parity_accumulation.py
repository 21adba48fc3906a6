"""Accumulation over microbatches: every way to defer, to clear and to scale equals one process."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import MegatronFSDP
from tests.conftest import RunRanks
from tests.support.case import (
    EVERY_WAY,
    IN_TURN,
    REPLICATED,
    Run,
    Scenario,
    Setting,
    check_strategies,
    defer_two_of_three,
    each_half,
)
from tests.support.zoo import MODEL_CASES

SOME = (Setting(0), Setting(3), REPLICATED, IN_TURN)
MANUAL = tuple(Setting(strategy, auto_sync=False) for strategy in range(4))
UNUSED, ODD = MODEL_CASES["unused"], MODEL_CASES["odd_shapes"]

Clear = Callable[[Run], None]

# ---- scripts ---------------------------------------------------------------------------------------------------------


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


def say_which_is_last(run: Run) -> None:
    if run.sharded is not None:
        run.sharded.set_model_auto_sync(False)
    for step in range(2):
        for microbatch in range(3):
            if run.sharded is not None:
                run.sharded.is_last_microbatch = microbatch == 2
            run.loss(10 * step + microbatch).backward()
        run.step()


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


def clear_and_go_on(run: Run, clear: Clear) -> None:
    run.loss(0).backward()
    clear(run)
    run.note_gradients("cleared")
    run.loss(1).backward()
    run.note_gradients()
    run.optimizer.step()
    clear(run)
    run.loss(2).backward()
    run.train(3)


def clear_deferred(run: Run, clear: Clear) -> None:
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


clear_deferred_by_optimizer = partial(clear_deferred, clear=zero_optimizer)


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


def clear_one_parameter(run: Run) -> None:
    run.loss(0).backward()
    run.parameters()["0.used.weight"].grad = None
    run.train(1)


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


def scale_below_unreduced_gradients(run: Run) -> None:
    run.loss(0).backward()
    with torch.no_grad():
        for param in run.parameters().values():
            if param.grad is not None:
                param.grad.div_(4.0)
    with run.no_sync():
        run.loss(1).backward()
    run.train(2)


def scale_all(run: Run) -> None:
    """`scale_gradients` reaches visible and deferred gradients alike."""
    run.loss(0).backward()
    with run.no_sync():
        run.loss(1).backward()
    run.scale(0.5)
    run.train(2)


# ---- one optimizer ---------------------------------------------------------------------------------------------------


@each_half(
    EVERY_WAY,
    defer_two_of_three,
    defer_on_top_of_visible_gradients,
    defer_forwards_only_half_way,
    say_which_is_last,
    clear_one_parameter,
    scale_between_microbatches,
    replace_between_microbatches,
    scale_below_unreduced_gradients,
    scale_all,
)
def test_what_is_deferred_cleared_and_scaled_equals_one_process(
    run_ranks: RunRanks, script: Callable[[Run], None], settings: Sequence[Any]
) -> None:
    check_strategies(run_ranks, 2, Scenario(script, UNUSED), settings)


CLEARS = (zero_optimizer, zero_model, zero_optimizer_in_place, zero_model_in_place, none_by_hand)


@pytest.mark.parametrize("clear", CLEARS)
def test_every_way_to_clear_gradients_clears_them(run_ranks: RunRanks, clear: Clear) -> None:
    settings = SOME[CLEARS.index(clear) % 2 :: 2]
    check_strategies(run_ranks, 2, Scenario(partial(clear_and_go_on, clear=clear), UNUSED), settings)


@pytest.mark.parametrize("clear", CLEARS[:3])
def test_clearing_forgets_what_was_deferred(run_ranks: RunRanks, clear: Clear) -> None:
    settings = SOME[CLEARS.index(clear) % 2 :: 2]
    check_strategies(run_ranks, 2, Scenario(partial(clear_deferred, clear=clear), ODD), settings)


def test_clearing_forgets_what_was_reduced_but_not_shown(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 2, Scenario(clear_before_any_sync, UNUSED), (*MANUAL, REPLICATED, IN_TURN))


def first_block(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for name, p in model.named_parameters() if name.removeprefix("module.")[0] == "0"], lr=0.1
    )


def all_but_the_first_block(model: nn.Module) -> torch.optim.Optimizer:
    others = [p for name, p in model.named_parameters() if name.removeprefix("module.")[0] != "0"]
    return torch.optim.SGD(others, lr=0.05, momentum=0.9)


def train_with_two_optimizers(run: Run) -> None:
    second = run.add_optimizer(all_but_the_first_block)
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
    second = run.add_optimizer(all_but_the_first_block)
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
    check_strategies(run_ranks, 2, Scenario(script, ODD, first_block), settings)


# ---- every way to synchronise, mixed inside one accumulation ---------------------------------------------------------


SHOWS = ("auto", "last", "sync", "hand")
"""After these the sum of everything so far is visible as `.grad`."""
WAYS = (*SHOWS, "wait", "no_sync")
"""`auto` synchronises every backward; `last` is the last microbatch without auto sync, and `wait` is none; `sync` and
`no_sync` are contexts; `hand` waits, then calls `finish_grad_sync()`."""


def _enter(model: MegatronFSDP, way: str) -> AbstractContextManager[None]:
    if way != "no_sync":
        model.set_model_auto_sync(way == "auto")
        model.is_last_microbatch = way == "last"
    if way == "no_sync":
        return model.no_sync()
    return model.sync() if way == "sync" else nullcontext()


def _accumulate(run: Run, ways: Sequence[str], first: int) -> None:
    for position, way in enumerate(ways):
        with _enter(run.sharded, way) if run.sharded is not None else nullcontext():
            (run.loss(first + position) / len(ways)).backward()
        if way == "hand" and run.sharded is not None:
            run.sharded.finish_grad_sync()
        if way in SHOWS:
            run.note_gradients(f"{ways} after {position}")
    run.optimizer.step()
    run.note_parameters(str(ways))
    run.optimizer.zero_grad()


def walk() -> list[str]:
    """All ways in an order in which each follows each, itself included, once; Hierholzer's algorithm on pairs."""
    left = {way: list(WAYS) for way in WAYS}
    stack, found = [WAYS[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            found.append(stack.pop())
    return found[::-1]


def sequences() -> list[tuple[str, ...]]:
    """Accumulations of 1 to 4 microbatches: each way alone, then the walk cut into pieces of 2, 3 and 4."""
    pieces: list[tuple[str, ...]] = [(way,) for way in WAYS]
    start, ways = 0, walk()
    for length in itertools.cycle((2, 3, 4)):
        if start == len(ways) - 1:
            break
        pieces.append(tuple(ways[start : start + length]))
        start += length - 1  # the next piece begins with the last of this one, so no pair is lost
    return pieces


def train_mixed(run: Run) -> None:
    for number, ways in enumerate(sequences()):
        _accumulate(run, ways, 10 * number)


@pytest.mark.full(short=["2-1"])
@pytest.mark.parametrize(("num_ranks", "strategy"), [(2, 1), (2, 2), (1, 3), (3, 0), (4, 3)])
def test_any_mixture_of_ways_to_synchronise_gives_the_sum(run_ranks: RunRanks, num_ranks: int, strategy: int) -> None:
    """Whatever was deferred or not shown by then is in the step, whether or not anybody said which one is the last."""
    case = MODEL_CASES["unused" if strategy % 2 else "odd_shapes"]
    check_strategies(run_ranks, num_ranks, Scenario(train_mixed, case), [Setting(strategy)])
