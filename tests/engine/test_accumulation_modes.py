"""Every way to say when gradients are reduced, mixed inside one accumulation, equals one process.

A microbatch is run in one of these ways:

    auto     every backward synchronises, the default of `fully_shard`
    wait     `set_model_auto_sync(False)`, and it is not the last microbatch
    last     the same, but it is
    no_sync  inside `no_sync()`
    sync     auto sync is off, inside `sync()`
    hand     as wait, then `finish_grad_sync()`
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest

from megatron_fsdp import MegatronFSDP
from tests.conftest import RunRanks
from tests.support.case import Run, Scenario, Setting, check_strategies
from tests.support.zoo import MODEL_CASES

SHOWS = ("auto", "last", "sync", "hand")
"""After these the sum of everything so far is visible as `.grad`."""
WAYS = (*SHOWS, "wait", "no_sync")


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


@pytest.mark.full(short=["2-1", "2-2"])
@pytest.mark.parametrize("strategy", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_mixture_of_ways_to_synchronise_gives_the_sum(run_ranks: RunRanks, num_ranks: int, strategy: int) -> None:
    """Whatever was deferred or not shown by then is in the step, whether or not anybody said which one is the last."""
    case = MODEL_CASES["unused" if strategy % 2 else "odd_shapes"]
    check_strategies(run_ranks, num_ranks, Scenario(train_mixed, case), [Setting(strategy)])
