"""Units that call other units, line by line; see tests/support/schedule_language.py for the language."""

import pytest

from megatron_fsdp.errors import ScheduleError
from tests.support.schedule_language import play


def test_a_unit_that_calls_another_keeps_its_weights() -> None:
    player = play(4, slots=1)
    assert player("F0> F1> F2> F2<") == "gather0 wait0 gather1@0 wait1 gather2@1 wait2"  # a slot more than asked for
    assert player("F1< F3> F3< F0<") == "release1 gather3@0 wait3"


def test_backward_of_an_inner_unit_leaves_the_outer_one_gathered() -> None:
    player = play(3, slots=1)
    player("F0> F1> F2> F2< F1< F0<")
    operations = player("B0> B1> B2> G2 G1 E")
    assert "release" not in operations
    assert "gather" not in operations


def test_an_outer_unit_with_memory_of_its_own_makes_room_for_an_inner_one() -> None:
    # In backward unit 1 takes the slot that was used least recently, where unit 2 lives; it is only counted there.
    player = play(5, resized=frozenset({1}))
    player("F0> F1> F2> F2< F1< F3> F3< F4> F4< F0<")
    assert player("B0> B4> G4 B3> G3 B1>") == "reduce4 reduce3 release4 gather1@1 wait1"
    assert player("B2> G2 G1 E") == "release3 gather2@1 wait2 reduce2 reduce1 reduce0 finalise"


def test_an_outer_unit_is_reduced_once_though_an_inner_one_is_reduced_before_it() -> None:
    player = play(3)
    player("F0> F1> F2> F2< F1< F0<")
    assert player("B0> B1> B2> G2 G1 E") == "reduce2 reduce1 reduce0 finalise"


def test_an_outer_unit_keeps_its_weights_while_others_are_gathered_ahead_in_backward() -> None:
    # Units 1 and 3 both call unit 2 and share slot 0. After the first step, unit 1 is expected after unit 2.
    step = "F0> F1> F2> F2< F1< F3> F2> F2< F3< F0< B0> B3> B2> g2"
    player = play()
    player(f"{step} G3 B1> B2> G2 G1 E")
    assert "release3" not in player(step).split()


def test_two_units_in_use_that_share_a_slot_are_refused() -> None:
    player = play()
    player("F0> F1> F1< F2> F2< F3>")  # units 1 and 3 live in slot 0
    with pytest.raises(ScheduleError, match="unit 1 is needed while unit 3, which shares its memory, is in use"):
        player("F1>")


def test_a_unit_without_an_open_forward_may_move_to_another_slot() -> None:
    player = play()
    player("F0> F1> f1< F2> f2< F3>")
    assert player("F1>") == "release2 gather1@1 wait1"


def test_a_forward_that_failed_ends_those_inside_it() -> None:
    player = play()
    player("F0> F1> F2> f0<")
    assert not player.scheduler.in_forward
    assert player("F0> F1> F1< F2> F2< F3> F3< F0<") == "release1 gather3@0 wait3"
