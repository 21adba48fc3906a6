"""Objects told from others by identity: nothing that changes goes unnoticed, and nothing is kept alive."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp.optim.local_step import SameObjects, SameState

State = dict[Any, Any]


def test_the_same_objects_are_the_same_and_equal_ones_are_not() -> None:
    things: list[Any] = [torch.ones(2), None, 1.5, torch.ones(2)]
    seen = SameObjects(things)
    assert seen.are(things)
    assert seen.are(iter(things))
    assert not seen.are(things[:3])
    assert not seen.are([*things, None])
    assert not seen.are([things[3], None, 1.5, things[0]])
    assert not seen.are([torch.ones(2), None, 1.5, things[3]])
    assert SameObjects([]).are([])
    assert not SameObjects([]).are([None])


def test_a_tensor_that_is_gone_is_not_none_and_is_not_kept() -> None:
    tensor = torch.ones(2)
    seen, gone = SameObjects([tensor, None]), weakref.ref(tensor)
    assert seen.are([tensor, None])
    del tensor
    assert gone() is None
    assert not seen.are([None, None])


def state() -> State:
    return {name: {"step": torch.ones(()), "exp_avg": torch.ones(2), "max": None} for name in ("a", "b")}


def nothing(_state: State) -> None:
    """What is there is what was there."""


def replace(source: State) -> None:
    source["b"]["exp_avg"] = source["b"]["exp_avg"].clone()


def exchange(source: State) -> None:
    source["a"]["exp_avg"], source["b"]["exp_avg"] = source["b"]["exp_avg"], source["a"]["exp_avg"]


def rename(source: State) -> None:
    source["b"]["other"] = source["b"].pop("max")


def hand_over(source: State) -> None:
    """The same names and things one after another, but one of them is another parameter's."""
    source["a"]["also"] = source["b"].pop("also")


def delete_one(source: State) -> None:
    del source["a"]


def delete_part(source: State) -> None:
    del source["b"]["max"]


def add(source: State) -> None:
    source["c"] = {}


def reorder(source: State) -> None:
    source["a"] = source.pop("a")


def make_none(source: State) -> None:
    source["a"]["exp_avg"] = None


def no_state(source: State) -> None:
    source["b"] = [1, 2]


@pytest.mark.parametrize(
    "deed",
    [nothing, replace, exchange, rename, hand_over, delete_one, delete_part, add, reorder, make_none, no_state],
    ids=lambda deed: deed.__name__,
)
def test_every_change_of_a_state_is_seen(deed: Callable[[State], None]) -> None:
    source = state()
    if deed is hand_over:
        source["b"] = {"also": torch.ones(2), **source["b"]}
    seen = SameState(source)
    assert seen.is_in(source)
    deed(source)
    assert seen.is_in(source) == (deed is nothing)


def test_where_somebody_keeps_what_is_no_state_nothing_is_known() -> None:
    source: State = {**state(), "count": 3}
    assert not SameState(source).is_in(source)
