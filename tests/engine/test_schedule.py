"""What the scheduler answers, line by line: events are one line of text, and what is to be done is another.

F1>   forward of unit 1 begins           F1<   ... ends; autograd will come back to it
f1<   ... ends, and autograd will not    B1>   backward of unit 1 begins (b1>: and reads no weights)
g1    its first gradient arrives         G1    its gradients are all there
E     the backward is over               W     the weights were changed
R     reset                              P1    weights wanted ahead, where there is room
A1    weights awaited outside of forward
"""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_fsdp.engine.schedule import Operation, RecordedOrder, ScheduleConfig, Scheduler
from megatron_fsdp.errors import ScheduleError

_EVENT = re.compile(
    r"(?P<kind>[FfBb])(?P<unit>\d+)(?P<edge>[<>])|(?P<single>[gGPA])(?P<single_unit>\d+)|(?P<bare>[EWR])"
)


@dataclass
class Play:
    """A scheduler and what a caller has to remember for it: the weights_version of each forward until its backward."""

    scheduler: Scheduler
    epochs: dict[int, list[int]] = field(default_factory=dict)
    changes: int = 0

    def __call__(self, events: str) -> str:
        """Feed events in order; return the operations as text."""
        return " ".join(str(operation) for event in events.split() for operation in self.feed(event))

    def feed(self, event: str) -> tuple[Operation, ...]:
        """Feed one event."""
        match = _EVENT.fullmatch(event)
        if match is None:
            raise ValueError(f"{event!r} is not an event; see the table at the top of this file.")
        if match["bare"]:
            return self._bare(match["bare"])
        if match["single"]:
            return self._single(match["single"], int(match["single_unit"]))
        return self._pass(match["kind"], int(match["unit"]), match["edge"])

    def _bare(self, kind: str) -> tuple[Operation, ...]:
        if kind == "E":
            return self.scheduler.backward_ends()
        operations = self.scheduler.weights_changed() if kind == "W" else self.scheduler.reset()
        self.changes += 1
        return operations

    def _single(self, kind: str, unit: int) -> tuple[Operation, ...]:
        if kind == "g":
            self.scheduler.gradient_arrives(unit)
            return ()
        if kind == "G":
            return self.scheduler.gradients_ready(unit)
        return self.scheduler.prefetch_requested(unit) if kind == "P" else self.scheduler.weights_requested(unit)

    def _pass(self, kind: str, unit: int, edge: str) -> tuple[Operation, ...]:
        if kind in "Bb":
            waiting = self.epochs.get(unit, [])
            version = waiting.pop() if waiting else self.changes
            return self.scheduler.backward_begins(unit, version, reads_weights=kind == "B")
        if edge == ">":
            return self.scheduler.forward_begins(unit)
        weights_version, operations = self.scheduler.forward_ends(unit, needs_backward=kind == "F")
        if kind == "F":
            self.epochs.setdefault(unit, []).append(weights_version)
        return operations


def play(units: int = 4, **options: Any) -> Play:
    """A new scheduler for a model of `units` trainable units, the root included; options as in `ScheduleConfig`."""
    return Play(Scheduler(ScheduleConfig(**{"trainable": (True,) * units, **options})))


# ---- tests -----------------------------------------------------------------------------------------------------------

FORWARD = "F0> F1> F1< F2> F2< F3> F3< F0<"
BACKWARD = "B0> B3> G3 B2> G2 B1> G1 E"
STEP = f"{FORWARD} {BACKWARD} W"
FORWARD_OF_TWO = "F0> F1> F1< F2> F2< F0<"
FORWARD_OF_FOUR = "F0> F1> F1< F2> F2< F3> F3< F4> F4< F0<"

# What a pass asks for once its order is known.
STEADY_FORWARD = "unshard0 unshard1@0 wait0 unshard2@1 wait1 reshard1 unshard3@0 wait2 wait3"
STEADY_BACKWARD = "reduce3 reshard3 unshard1@0 reduce2 wait1 reduce1 reduce0 finalise"
STEADY = f"{STEADY_FORWARD} {STEADY_BACKWARD} reshard0 reshard1 reshard2"

SWAPPED = "F0> F2> F2< F1> F1< F3> F3< F0<"
RECOMPUTING = "B0> B3> F3> F3< G3 B2> F2> f2< G2 B1> F1> f1< G1 E"
EVALUATION = "F0> F1> f1< F2> f2< F3> f3< f0<"

Line = str | tuple[str, str | ScheduleError]
"""Events; or events and what the scheduler answers or refuses them with."""


@dataclass(frozen=True)
class Case:
    """What is played, line by line, to a scheduler of so many units, the root included, with such options."""

    lines: tuple[Line, ...]
    units: int
    options: dict[str, Any]


def case(*lines: Line, units: int = 4, **options: Any) -> Case:
    return Case(lines, units, options)


def after_one_step(**options: object) -> Play:
    """A scheduler of three units and the root that has seen one whole step."""
    player = play(**options)
    player(STEP)
    return player


CASES = {
    # the plain case
    "first_forward_gathers_each_unit_when_it_is_needed": case(
        (FORWARD, "unshard0 wait0 unshard1@0 wait1 unshard2@1 wait2 reshard1 unshard3@0 wait3")
    ),
    "a_backward_that_reads_no_weights_gathers_none_and_is_not_prefetched": case(
        STEP.replace("B1>", "b1>"),
        (FORWARD, STEADY_FORWARD),
        (BACKWARD.replace("B1>", "b1>"), "reduce3 reduce2 reduce1 reduce0 finalise"),
    ),
    "every_later_step_gathers_one_unit_ahead_into_the_slot_it_had": case(
        STEP, (STEP, STEADY), (STEP, STEADY), (STEP, STEADY)
    ),
    # weights that do and do not change
    "accumulation_keeps_the_root_and_the_units_used_last": case(
        f"{FORWARD} {BACKWARD}", (FORWARD, "reshard1 unshard3@0 wait3"), (BACKWARD, STEADY_BACKWARD)
    ),
    "weights_that_change_inside_a_forward_are_refused": case(
        "F0> F1>", ("W", ScheduleError("the weights were changed inside a forward"))
    ),
    "backward_of_a_forward_from_before_the_change_is_refused": case(
        f"{FORWARD} W", ("B0>", ScheduleError("ran before the weights were changed"))
    ),
    "evaluation_gathers_in_forward_order_and_reduces_nothing": case(
        EVALUATION, (EVALUATION, "reshard3 unshard1@0 wait1 reshard1 unshard3@0 wait3")
    ),
    # orders
    "a_pass_in_another_order_gathers_on_demand_and_is_recorded_anew": case(
        STEP,
        # Unit 1 had been gathered ahead at the root, in vain for now; afterwards nothing is gathered ahead.
        (SWAPPED, "unshard0 unshard1@0 wait0 unshard2@1 wait2 wait1 reshard1 unshard3@0 wait3"),
        "B0> B3> G3 B1> G1 B2> G2 E W",
        (SWAPPED, "unshard0 unshard2@1 wait0 unshard1@0 wait2 wait1 reshard1 unshard3@0 wait3"),
    ),
    # gradients
    "unit_with_missing_gradients_is_reduced_when_the_next_unit_begins": case(
        FORWARD, ("B0> B3> G3 B2> g2", "reduce3"), ("B1>", "reduce2 reshard3 unshard1@0 wait1")
    ),
    "reused_unit_is_not_reduced_before_its_last_backward": case(
        "F0> F1> F1< F2> F2< F1> F1< F0<", ("B0> B1> g1 B2> G2 B1> G1 E", "reduce2 reduce1 reduce0 finalise"), units=3
    ),
    "late_gradients_of_a_reduced_unit_are_reduced_at_the_end": case(
        FORWARD_OF_TWO, ("B0> B2> B1> G1 g2 E", "reduce2 reduce1 reduce2 reduce0 finalise"), units=3
    ),
    "gradient_of_released_unit_without_announcement_is_refused": case(
        FORWARD, ("g1", ScheduleError("a gradient arrived for a unit whose backward was never announced"))
    ),
    "late_reduction_reduces_everything_when_backward_is_over": case(
        FORWARD,
        ("B0> B3> G3 B2> G2 B1> G1", "reshard3 unshard1@0 wait1"),
        ("E", "reduce3 reduce2 reduce1 reduce0 finalise"),
        reduces_early=False,
    ),
    # recomputation
    "recomputing_a_unit_inside_its_backward_asks_for_nothing_more": case(
        FORWARD,
        (RECOMPUTING, "reduce3 reduce2 reshard3 unshard1@0 wait1 reduce1 reduce0 finalise"),
        f"W {FORWARD}",
        (RECOMPUTING, STEADY_BACKWARD),
    ),
    "reentrant_recomputation_announces_backward_after_the_second_forward": case(
        "F0> F1> f1< F2> f2< F3> f3< F4> f4< F0<",
        ("B0> F3> F3< F4> F4< B4> G4 B3> G3", "reduce4 reduce3"),
        (
            "F1> F1< F2> F2< B2> G2 B1> G1 E",
            "reshard3 unshard1@0 wait1 reshard4 unshard2@1 wait2 reduce2 reduce1 reduce0 finalise",
        ),
        units=5,
    ),
    "a_longer_recomputation_than_there_are_slots_gathers_again": case(
        "F0> F1> f1< F2> f2< F3> f3< F0<",
        (
            "B0> F1> F1< F2> F2< F3> F3< B3> G3 B2> G2 B1> G1 E",
            (
                "reshard3 unshard1@0 wait1 reshard1 unshard3@0 wait3 "
                "reduce3 reduce2 reshard3 unshard1@0 wait1 reduce1 reduce0 finalise"
            ),
        ),
    ),
    # strategies
    "replicated_weights_are_gathered_in_place_once_per_step": case(
        (FORWARD, "unshard0 wait0 unshard1 wait1 unshard2 wait2 unshard3 wait3"),
        (BACKWARD, "reduce3 reduce2 reduce1 reduce0 finalise"),
        (f"{FORWARD} {BACKWARD}", "reduce3 reduce2 reduce1 reduce0 finalise"),
        ("W", "reshard0 reshard1 reshard2 reshard3"),
        (FORWARD, "unshard0 unshard1 wait0 unshard2 wait1 unshard3 wait2 wait3"),
        shares_slots=False,
    ),
    # more slots, more depth
    "three_slots_and_depth_two_gather_two_units_ahead": case(
        f"{FORWARD_OF_FOUR} B0> B4> G4 B3> G3 B2> G2 B1> G1 E W",
        (
            FORWARD_OF_FOUR,
            "unshard0 unshard1@0 unshard2@1 wait0 unshard3@2 wait1 reshard1 unshard4@0 wait2 wait3 wait4",
        ),
        (
            "B0> B4> G4 B3> G3 B2> G2 B1> G1 E",
            "reduce4 reshard4 unshard1@0 reduce3 reduce2 wait1 reduce1 reduce0 finalise",
        ),
        units=5,
        slots=3,
        forward_prefetch_units=2,
        backward_prefetch_units=2,
    ),
    # asked from outside, broken off
    "weights_wanted_ahead_are_only_waited_for_by_the_forward": case(
        ("P0 P1 P2", "unshard0 unshard1@0 unshard2@1"), ("F0> F1>", "wait0 wait1")
    ),
    "forward_from_before_a_reset_cannot_be_run_backward": case(
        f"{FORWARD} R", ("B3>", ScheduleError("before the weights were changed"))
    ),
    # units that call other units
    "a_unit_that_calls_another_keeps_its_weights": case(
        ("F0> F1> F2> F2<", "unshard0 wait0 unshard1@0 wait1 unshard2@1 wait2"),  # a slot more than asked for
        ("F1< F3> F3< F0<", "reshard1 unshard3@0 wait3"),
        units=4,
        slots=1,
    ),
    "an_inner_unit_is_reduced_before_the_outer_one_which_stays_gathered": case(
        "F0> F1> F2> F2< F1< F0<", ("B0> B1> B2> G2 G1 E", "reduce2 reduce1 reduce0 finalise"), units=3, slots=1
    ),
    "an_outer_unit_with_memory_of_its_own_makes_room_for_an_inner_one": case(
        # In backward unit 1 takes the slot that was used least recently, where unit 2 lives; it is only counted there.
        "F0> F1> F2> F2< F1< F3> F3< F4> F4< F0<",
        ("B0> B4> G4 B3> G3 B1>", "reduce4 reduce3 reshard4 unshard1@1 wait1"),
        ("B2> G2 G1 E", "reshard3 unshard2@1 wait2 reduce2 reduce1 reduce0 finalise"),
        units=5,
        resized=frozenset({1}),
    ),
    "two_units_in_use_that_share_a_slot_are_refused": case(
        "F0> F1> F1< F2> F2< F3>",
        ("F1>", ScheduleError("unit 1 is needed while unit 3, which shares its memory, is in use")),
    ),
    "a_unit_without_an_open_forward_may_move_to_another_slot": case(
        "F0> F1> f1< F2> f2< F3>", ("F1>", "reshard2 unshard1@1 wait1")
    ),
    # memory of its own, or that is given back
    "private_units_take_no_slot_and_give_way_to_nobody": case(
        (FORWARD, "unshard0 wait0 unshard1@0 wait1 unshard2 wait2 reshard1 unshard3@0 wait3"),
        (BACKWARD, "reduce3 reduce2 reshard3 unshard1@0 wait1 reduce1 reduce0 finalise"),
        ("W", "reshard0 reshard1 reshard2"),
        # The persistent one is gathered ahead although the only slot is taken.
        ("F0> F1>", "unshard0 unshard1@0 wait0 unshard2 wait1"),
        without_slot=frozenset({2}),
        slots=1,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_answers(case: Case) -> None:
    player = play(case.units, **case.options)
    for line in case.lines:
        events, answer = (line, None) if isinstance(line, str) else line
        if isinstance(answer, ScheduleError):
            with pytest.raises(ScheduleError, match=str(answer)):
                player(events)
        else:
            told = player(events)
            assert answer is None or told == answer


def test_reset_in_forward_brings_everything_to_rest() -> None:
    player = play()
    player("F0> F1> F1< F2>")
    assert player("R") == "reshard0 reshard1 reshard2"
    assert not player.scheduler.in_forward
    assert player(FORWARD) == "unshard0 wait0 unshard1@0 wait1 unshard2@1 wait2 reshard1 unshard3@0 wait3"


def test_reset_in_backward_forgets_what_was_not_reduced_and_learnt() -> None:
    player = after_one_step()
    player(f"{FORWARD} B0> B3> G3 B2> g2")
    player("R")
    assert not player.scheduler.in_backward
    # Other ranks may have been stopped elsewhere: all begin anew, and so decide alike.
    assert player(STEP) == play()(STEP)
    assert player(f"{FORWARD} {BACKWARD}") == f"{STEADY_FORWARD} {STEADY_BACKWARD}"


def test_an_outer_unit_keeps_its_weights_while_others_are_gathered_ahead_in_backward() -> None:
    # Units 1 and 3 both call unit 2 and share slot 0. After the first step, unit 1 is expected after unit 2.
    step = "F0> F1> F2> F2< F1< F3> F2> F2< F3< F0< B0> B3> B2> g2"
    player = play()
    player(f"{step} G3 B1> B2> G2 G1 E")
    assert "reshard3" not in player(step).split()


def test_a_forward_that_failed_ends_those_inside_it() -> None:
    player = play()
    player("F0> F1> F2> f0<")
    assert not player.scheduler.in_forward
    assert player("F0> F1> F1< F2> F2< F3> F3< F0<") == "reshard1 unshard3@0 wait3"


# ---- memory of its own, or that is given back ----------------------------------------------------------------------

EVERYTHING = frozenset(range(4))


def numberless(operations: str) -> str:
    """Without slot numbers, which mean nothing to units that have memory of their own."""
    return re.sub(r"@\d+", "", operations)


def resized(**options: object) -> Play:
    """Every unit and the root have memory of their own that is given back; the order is known."""
    player = play(resized=EVERYTHING - {0}, resharded_after_backward=EVERYTHING, **options)
    player(STEP)
    return player


def test_memory_that_is_given_back_is_released_when_the_backward_is_over() -> None:
    player = resized()
    assert numberless(player(FORWARD)) == "unshard0 unshard1 wait0 unshard2 wait1 reshard1 unshard3 wait2 wait3"
    assert numberless(player("B0> B3> G3 B2> G2 B1> G1")) == "reduce3 reshard3 unshard1 reduce2 wait1 reduce1"
    assert player("E") == "reshard0 reshard1 reshard2 reduce0 finalise"
    assert player("W") == ""


def given_back_per_step(microbatches: int = 1) -> Play:
    """The root's memory is given back when the last backward of a step is over; one step has been seen."""
    player = play(resharded_before_step=frozenset({0}))
    first = player(" ".join([FORWARD, BACKWARD] * microbatches))
    assert "reshard0" not in first.split()  # nothing is known of the first step
    assert player("W").startswith("reshard0 ")
    return player


def test_the_root_is_released_when_the_last_backward_of_a_step_is_over_before_its_own_reduction() -> None:
    player = given_back_per_step()
    player(f"{FORWARD} B0> B3> G3 B2> G2 B1> G1")
    assert player("E") == "reshard0 reduce0 finalise"
    assert player("W") == "reshard1 reshard2"
    assert player("F0>").startswith("unshard0 ")


def test_between_the_microbatches_of_a_step_the_root_stays() -> None:
    player = given_back_per_step(microbatches=3)
    plain = play()
    for each in (player, plain):
        each(" ".join([FORWARD, BACKWARD] * 3) + " W")
    for _ in range(2):
        assert player(f"{FORWARD} {BACKWARD}") == plain(f"{FORWARD} {BACKWARD}")
    assert player(FORWARD) == plain(FORWARD)
    assert player(BACKWARD) == plain(BACKWARD).replace("reduce0", "reshard0 reduce0")


def test_a_step_with_more_backwards_than_the_one_before_gathers_the_root_once_more() -> None:
    player = given_back_per_step()
    gathers = [player(f"{FORWARD} {BACKWARD}").split().count("unshard0") for _ in range(3)]
    assert gathers == [1, 1, 0]
    player("W")
    gathers = [player(f"{FORWARD} {BACKWARD}").split().count("unshard0") for _ in range(3)]
    assert gathers == [1, 0, 0]


def test_a_reset_forgets_how_long_steps_are() -> None:
    player = given_back_per_step()
    player("R")
    assert "reshard0" not in player(f"{FORWARD} {BACKWARD}").split()


def test_a_unit_with_memory_of_its_own_needs_no_particular_slot() -> None:
    player = resized()
    player("F0> F1> F1< F2> F2< F3> F3< F0<")
    # Unit 1 shared a slot in forward with unit 3, which is in use.
    assert numberless(player("B0> B3> A1")) == "reshard2 unshard1 wait1"
    in_slots = play()
    in_slots(FORWARD)
    with pytest.raises(ScheduleError, match="which shares its memory, is in use"):
        in_slots("B0> B3> A1")


def test_what_a_forward_uses_is_not_given_back_by_a_backward_inside_it() -> None:
    player = resized()
    assert numberless(player("F0> F1> F1< F2> B1> G1 E")).endswith("reduce1 reshard1 reduce0 finalise")


def test_looking_further_ahead_adds_slots_where_allowed() -> None:
    player = play()
    player.scheduler.look_ahead(2, may_grow=True)
    player(STEP)
    assert player.scheduler.config.slots == 3
    assert player(FORWARD) == "unshard0 unshard1@0 unshard2@1 wait0 unshard3@2 wait1 wait2 wait3"


def test_looking_further_ahead_stays_within_the_slots_where_they_are_fixed() -> None:
    player = play()
    player.scheduler.look_ahead(2, may_grow=False)
    config = player.scheduler.config
    assert (config.slots, config.forward_prefetch_units, config.backward_prefetch_units) == (2, 1, 1)


# A whole pass each, then the units noted in the next pass, and at which depth which units are foretold.
FORETOLD: dict[str, tuple[list[list[int]], list[int], int, tuple[int, ...]]] = {
    "the first pass foretells nothing": ([], [0], 3, ()),
    "nothing was needed yet": ([[0, 1, 2, 3]], [], 1, ()),
    "the next units, nearest first": ([[0, 1, 2, 3]], [0], 2, (1, 2)),
    "no more than there are": ([[0, 1, 2, 3]], [0, 1], 9, (2, 3)),
    "nothing at the end": ([[0, 1, 2, 3]], [0, 1, 2, 3], 1, ()),
    "nothing at depth zero": ([[0, 1]], [0], 0, ()),
    "twice in a row counts once": ([[0, 1, 1, 2]], [0, 1], 1, (2,)),
    "also in this pass": ([[0, 1, 1, 2]], [0, 1, 1], 1, (2,)),
    "again later counts twice": ([[1, 2, 1]], [1, 2], 1, (1,)),
    "nothing where it left the order": ([[0, 1, 2]], [0, 2], 1, ()),
    "nor later in this pass": ([[0, 1, 2]], [0, 2, 2, 1], 1, ()),
    "the order that was taken is expected next": ([[0, 1, 2], [0, 2, 1]], [0], 2, (2, 1)),
    "nothing beyond the recorded pass": ([[0, 1]], [0, 1, 2], 1, ()),
}


def test_a_repeated_pass_foretells_the_next_units() -> None:
    for name, (passes, noted, depth, expected) in FORETOLD.items():
        order = RecordedOrder()
        for units in passes:
            order.begin()
            for unit in units:
                order.note(unit)
            order.end()
        order.begin()
        order.note(5)
        order.begin()  # a pass that is broken off leaves the recorded order
        for unit in noted:
            order.note(unit)
        assert order.upcoming(depth) == expected, name
