"""What the scheduler answers where units have memory of their own, or where it is given back; see test_schedule."""

import re

import pytest

from megatron_fsdp.errors import ScheduleError
from tests.support.schedule_language import Play, play

FORWARD = "F0> F1> F1< F2> F2< F3> F3< F0<"
BACKWARD = "B0> B3> G3 B2> G2 B1> G1 E"
EVERYTHING = frozenset(range(4))


def numberless(operations: str) -> str:
    """Without slot numbers, which mean nothing to units that have memory of their own."""
    return re.sub(r"@\d+", "", operations)


def resized(**options: object) -> Play:
    """Every unit and the root have memory of their own that is given back; the order is known."""
    player = play(resized=EVERYTHING - {0}, returned=EVERYTHING, **options)
    player(f"{FORWARD} {BACKWARD} W")
    return player


def test_memory_that_is_given_back_is_released_when_the_backward_is_over() -> None:
    player = resized()
    assert numberless(player(FORWARD)) == "gather0 gather1 wait0 gather2 wait1 release1 gather3 wait2 wait3"
    assert numberless(player("B0> B3> G3 B2> G2 B1> G1")) == "reduce3 release3 gather1 reduce2 wait1 reduce1"
    assert player("E") == "release0 release1 release2 reduce0 finalise"
    assert player("W") == ""


def test_a_second_microbatch_gathers_everything_again() -> None:
    player = resized()
    first = player(f"{FORWARD} {BACKWARD}")
    assert numberless(player(f"{FORWARD} {BACKWARD}")) == numberless(first)


def given_back_per_step(microbatches: int = 1) -> Play:
    """The root's memory is given back when the last backward of a step is over; one step has been seen."""
    player = play(returned_before_step=frozenset({0}))
    first = player(" ".join([FORWARD, BACKWARD] * microbatches))
    assert "release0" not in first.split()  # nothing is known of the first step
    assert player("W").startswith("release0 ")
    return player


def test_the_root_is_released_when_the_last_backward_of_a_step_is_over_before_its_own_reduction() -> None:
    player = given_back_per_step()
    player(f"{FORWARD} B0> B3> G3 B2> G2 B1> G1")
    assert player("E") == "release0 reduce0 finalise"
    assert player("W") == "release1 release2"
    assert player("F0>").startswith("gather0 ")


def test_between_the_microbatches_of_a_step_the_root_stays() -> None:
    player = given_back_per_step(microbatches=3)
    plain = play()
    for each in (player, plain):
        each(" ".join([FORWARD, BACKWARD] * 3) + " W")
    for _ in range(2):
        assert player(f"{FORWARD} {BACKWARD}") == plain(f"{FORWARD} {BACKWARD}")
    assert player(FORWARD) == plain(FORWARD)
    assert player(BACKWARD) == plain(BACKWARD).replace("reduce0", "release0 reduce0")


def test_a_step_with_more_backwards_than_the_one_before_gathers_the_root_once_more() -> None:
    player = given_back_per_step()
    gathers = [player(f"{FORWARD} {BACKWARD}").split().count("gather0") for _ in range(3)]
    assert gathers == [1, 1, 0]
    player("W")
    gathers = [player(f"{FORWARD} {BACKWARD}").split().count("gather0") for _ in range(3)]
    assert gathers == [1, 0, 0]


def test_evaluation_gives_no_memory_of_the_root_back() -> None:
    player = given_back_per_step()
    evaluation = "F0> F1> f1< F2> f2< F3> f3< f0<"
    for _ in range(3):
        assert "release0" not in player(evaluation).split()
    assert player(f"{FORWARD} {BACKWARD}").split().count("gather0") == 0


def test_a_reset_forgets_how_long_steps_are() -> None:
    player = given_back_per_step()
    player("R")
    assert "release0" not in player(f"{FORWARD} {BACKWARD}").split()


def test_a_unit_with_memory_of_its_own_needs_no_particular_slot() -> None:
    player = resized()
    player("F0> F1> F1< F2> F2< F3> F3< F0<")
    # Unit 1 shared a slot in forward with unit 3, which is in use.
    assert numberless(player("B0> B3> A1")) == "release2 gather1 wait1"
    in_slots = play()
    in_slots(FORWARD)
    with pytest.raises(ScheduleError, match="which shares its memory, is in use"):
        in_slots("B0> B3> A1")


def test_one_unit_at_a_time_is_gathered_on_demand() -> None:
    player = resized(slots=1, prefetch_forward=0, prefetch_backward=0)
    assert player(FORWARD) == "gather0 wait0 gather1@0 wait1 release1 gather2@0 wait2 release2 gather3@0 wait3"


def test_private_units_take_no_slot_and_give_way_to_nobody() -> None:
    player = play(kept=frozenset({2}), slots=1)
    assert player(FORWARD) == "gather0 wait0 gather1@0 wait1 gather2 wait2 release1 gather3@0 wait3"
    assert player(BACKWARD) == "reduce3 reduce2 release3 gather1@0 wait1 reduce1 reduce0 finalise"
    assert player("W") == "release0 release1 release2"
    # The kept one is gathered ahead although the only slot is taken.
    assert player("F0> F1>") == "gather0 gather1@0 wait0 gather2 wait1"


def test_what_a_forward_uses_is_not_given_back_by_a_backward_inside_it() -> None:
    player = resized()
    assert numberless(player("F0> F1> F1< F2> B1> G1 E")).endswith("reduce1 release1 reduce0 finalise")


def test_looking_further_ahead_adds_slots_where_allowed() -> None:
    player = play()
    player.scheduler.look_ahead(2, may_grow=True)
    player(f"{FORWARD} {BACKWARD} W")
    assert player.scheduler.config.slots == 3
    assert player(FORWARD) == "gather0 gather1@0 gather2@1 wait0 gather3@2 wait1 wait2 wait3"


def test_looking_further_ahead_stays_within_the_slots_where_they_are_fixed() -> None:
    player = play()
    player.scheduler.look_ahead(2, may_grow=False)
    config = player.scheduler.config
    assert (config.slots, config.prefetch_forward, config.prefetch_backward) == (2, 1, 1)


def test_looking_less_far_ahead_keeps_the_slots() -> None:
    player = play(slots=3)
    player.scheduler.look_ahead(0, may_grow=True)
    player(f"{FORWARD} {BACKWARD} W")
    assert player(FORWARD) == "gather0 wait0 gather1@0 wait1 gather2@1 wait2 gather3@2 wait3"


def test_whole_weights_are_gathered_ahead_without_slots() -> None:
    player = play(shares_slots=False)
    player.scheduler.look_ahead(3, may_grow=True)
    player(f"{FORWARD} {BACKWARD} W")
    assert player("F0>") == "gather0 gather1 gather2 gather3 wait0"
