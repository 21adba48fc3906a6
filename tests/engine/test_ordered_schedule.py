"""Ranks that may skip units: the collectives of a pass are the same on all of them, and the weights are there."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from megatron_fsdp.engine.ordered_schedule import OrderedScheduler, UnitOrder
from megatron_fsdp.engine.schedule import Action, Operation, ScheduleConfig
from megatron_fsdp.errors import ScheduleError

FLAT = (0, 0, 0, 0, 0)
"""The units around the root and four units beside each other."""
NESTED = (0, 0, 1, 1, 0, 4)
"""Unit 1 is around 2 and 3, unit 4 around 5."""


@dataclass
class Rank:
    """One rank: its scheduler, what it sends, and the calls of its last forward."""

    parents: tuple[int, ...]
    options: dict[str, object]
    sent: list[str] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)
    wanting: set[int] = field(default_factory=set)  # units whose gradients have come and are not reduced

    def __post_init__(self) -> None:
        count = len(self.parents)
        order = UnitOrder(tuple(range(1, count)), self.parents, tuple(f"unit {index}" for index in range(count)))
        config = ScheduleConfig(**{"trainable": (True,) * count, **self.options})  # type: ignore[arg-type]
        self.scheduler = OrderedScheduler(config, order)

    def run(self, operations: tuple[Operation, ...]) -> None:
        for operation in operations:
            if operation.action in (Action.UNSHARD, Action.REDUCE, Action.FINALISE):
                self.sent.append(str(operation).partition("@")[0])
            if operation.action is Action.REDUCE:
                self.wanting.discard(operation.unit)

    def forward(self, path: list[int], *, takes_gradients: bool, checkpoints: bool = False) -> None:
        """Run a forward that calls these units in this order, each inside of the unit around it if that runs."""
        self.scheduler.takes_gradients = takes_gradients
        self.calls = []
        has_graph = takes_gradients and not checkpoints
        self.run(self.scheduler.forward_begins(0))
        open_units = [0]
        for unit in [*path, 0]:
            while len(open_units) > 1 and open_units[-1] != self.parents[unit]:
                self._end(open_units.pop(), has_graph)
            if unit:
                self.run(self.scheduler.forward_begins(unit))
                assert self.scheduler.is_gathered(unit)
                open_units.append(unit)
        self._end(0, has_graph)

    def _end(self, unit: int, has_graph: bool) -> None:
        number, operations = self.scheduler.forward_ends(unit, has_graph)
        self.calls.append((unit, number))
        self.run(operations)

    def backward(self, *, checkpoints: bool = False) -> None:
        """Run the backward of the last forward, in the reverse order of its calls."""
        for unit, number in reversed(self.calls):
            call = number
            if checkpoints and unit:
                self.run(self.scheduler.forward_begins(unit))
                call, operations = self.scheduler.forward_ends(unit, needs_backward=True)
                self.run(operations)
            self.run(self.scheduler.backward_begins(unit, call))
            assert self.scheduler.is_gathered(unit)
            self.scheduler.gradient_arrives(unit)
            self.wanting.add(unit)
        self.run(self.scheduler.backward_ends())
        assert not self.wanting, "gradients that were never reduced"

    def step(self) -> None:
        self.run(self.scheduler.weights_changed())


def paths_of(parents: tuple[int, ...], draw: random.Random) -> Iterator[int]:
    """Draw the units that a rank calls: some, and none inside of one that it skips."""
    skipped: set[int] = set()
    for unit in range(1, len(parents)):
        if parents[unit] in skipped or draw.random() < 0.4:
            skipped.add(unit)
        else:
            yield unit


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("parents", [FLAT, NESTED])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": 3, "forward_prefetch_units": 2, "backward_prefetch_units": 2},
        {"shares_slots": False},
        {"gathers": False},
        {"shares_slots": False, "reduces_early": False},
    ],
)
def test_ranks_that_skip_units_send_the_same(
    options: dict[str, object], parents: tuple[int, ...], checkpoints: bool
) -> None:
    draw = random.Random(7)
    for _ in range(50):
        ranks = [Rank(parents, options) for _ in range(3)]
        for _ in range(3):
            passes = draw.choice(["b", "nb", "bb", "n"])
            for kind in passes:
                for rank in ranks:
                    path = list(paths_of(parents, draw))
                    rank.forward(path, takes_gradients=kind == "b", checkpoints=checkpoints)
                    if kind == "b":
                        rank.backward(checkpoints=checkpoints)
            for rank in ranks:
                rank.step()
        assert ranks[0].sent == ranks[1].sent == ranks[2].sent


def test_a_skipped_unit_is_gathered_and_reduced_in_its_place() -> None:
    rank = Rank(FLAT, {"forward_prefetch_units": 0, "backward_prefetch_units": 0})
    rank.forward([2], takes_gradients=True)
    assert " ".join(rank.sent) == "unshard0 unshard1 unshard2 unshard3 unshard4"
    assert rank.scheduler.filled_in == 3
    rank.sent.clear()
    rank.backward()
    assert " ".join(rank.sent) == "reduce4 reduce3 unshard2 reduce2 unshard1 reduce1 reduce0 finalise"


def test_a_unit_that_is_called_again_uses_what_is_there() -> None:
    rank = Rank(FLAT, {})
    rank.forward([1, 2, 1, 3], takes_gradients=True)
    assert [each for each in rank.sent if each == "unshard1"] == ["unshard1"]
    other = Rank(FLAT, {})
    other.forward([3], takes_gradients=True)
    assert rank.sent == other.sent
    with pytest.raises(ScheduleError, match=r"unit 1 is needed again, .* larger max_gathered_units"):
        rank.forward([1, 2, 3, 1], takes_gradients=True)


def test_a_unit_against_the_order_is_refused_with_the_order() -> None:
    with pytest.raises(ScheduleError, match=r"unit 1 was called after .* unit 1 -> unit 2 -> unit 3 -> unit 4"):
        Rank(FLAT, {}).forward([2, 1], takes_gradients=True)
    with pytest.raises(ScheduleError, match="unit 2 was called outside of a forward of the model"):
        Rank(FLAT, {}).scheduler.forward_begins(2)


def test_two_forwards_before_a_backward_are_refused() -> None:
    rank = Rank(FLAT, {})
    rank.forward([1, 2, 3, 4], takes_gradients=True)
    first = rank.calls
    rank.forward([1, 2, 3, 4], takes_gradients=True)
    with pytest.raises(ScheduleError, match="run the backward of each forward before the next one"):
        rank.scheduler.backward_begins(*first[-1])


def test_units_recomputed_together_are_refused() -> None:
    rank = Rank(FLAT, {})
    rank.forward([1, 2, 3, 4], takes_gradients=True, checkpoints=True)
    scheduler = rank.scheduler
    rank.run(scheduler.backward_begins(*rank.calls[-1]))
    for unit in (1, 2):
        rank.run(scheduler.forward_begins(unit))
        call, _ = scheduler.forward_ends(unit, needs_backward=True)
    rank.run(scheduler.backward_begins(2, call))
    with pytest.raises(ScheduleError, match="recompute each unit by itself"):
        scheduler.gradient_arrives(2)
