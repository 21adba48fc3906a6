"""Activation checkpointing in every place, both kinds, equals one process."""

from functools import partial

import pytest

from tests.conftest import RunRanks
from tests.support.case import Run, Scenario, Setting, check_strategies
from tests.support.zoo import ModelCase, Recomputed, Where, vector_case

PLACES: tuple[Where, ...] = ("units", "inside", "pairs", "all")


def _case(where: Where, reentrant: bool) -> ModelCase:
    return vector_case(partial(Recomputed, where, reentrant))


def train_and_accumulate(run: Run) -> None:
    run.train(0, 1)
    with run.no_sync():
        run.loss(2).backward()
    run.train(3)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_recomputed_activations_give_the_same_gradients(run_ranks: RunRanks, where: Where, reentrant: bool) -> None:
    scenario = Scenario(train_and_accumulate, _case(where, reentrant))
    check_strategies(run_ranks, 2, scenario, [Setting(3), Setting(2)])


def two_recomputed_forwards(run: Run) -> None:
    (run.loss(0) + run.loss(1)).backward()
    run.step()
    losses = [run.loss(2), run.loss(3)]
    for loss in losses:
        loss.backward()
    run.step()


@pytest.mark.parametrize("where", PLACES)
def test_two_recomputed_forwards_before_backward(run_ranks: RunRanks, where: Where) -> None:
    check_strategies(run_ranks, 2, Scenario(two_recomputed_forwards, _case(where, False)), [Setting(3)])
