"""What the scheduler answers, line by line. The language of events is described in tests/support/schedule_language.py.

Operations read `gather3@1` (unit 3 into slot 1), `wait3`, `release3`, `reduce3`, `finalise`. Unit 0 is the root.
"""

import pytest

from megatron_fsdp.engine.schedule import Action, Operation, ScheduleConfig, Scheduler
from megatron_fsdp.errors import ScheduleError
from tests.support.schedule_language import Play, play

FORWARD = "F0> F1> F1< F2> F2< F3> F3< F0<"
BACKWARD = "B0> B3> G3 B2> G2 B1> G1 E"

# What a pass asks for once its order is known.
STEADY_FORWARD = "gather0 gather1@0 wait0 gather2@1 wait1 release1 gather3@0 wait2 wait3"
STEADY_BACKWARD = "reduce3 release3 gather1@0 reduce2 wait1 reduce1 reduce0 finalise"


def after_one_step(**options: object) -> Play:
    """A scheduler of three units and the root that has seen one whole step."""
    player = play(**options)
    player(f"{FORWARD} {BACKWARD} W")
    return player


# ---- the plain case ---------------------------------------------------------------------------------------------


def test_first_forward_gathers_each_unit_when_it_is_needed() -> None:
    assert play()(FORWARD) == "gather0 wait0 gather1@0 wait1 gather2@1 wait2 release1 gather3@0 wait3"


def test_first_backward_finds_the_units_used_last_and_gathers_the_others_when_needed() -> None:
    player = play()
    player(FORWARD)
    assert player(BACKWARD) == "reduce3 reduce2 release3 gather1@0 wait1 reduce1 reduce0 finalise"


def test_second_step_gathers_one_unit_ahead_in_both_directions() -> None:
    player = after_one_step()
    assert player(FORWARD) == STEADY_FORWARD
    assert player(BACKWARD) == STEADY_BACKWARD


def test_every_later_step_is_like_the_second() -> None:
    player = after_one_step()
    steps = [player(f"{FORWARD} {BACKWARD} W") for _ in range(3)]
    assert steps == [f"{STEADY_FORWARD} {STEADY_BACKWARD} release0 release1 release2"] * 3


def test_prefetched_gather_starts_before_the_wait_for_the_unit_in_hand() -> None:
    player = after_one_step()
    assert player("F0> F1>") == "gather0 gather1@0 wait0 gather2@1 wait1"


def test_a_unit_comes_back_into_the_slot_it_had() -> None:
    player = after_one_step()
    steps = " ".join(player(f"{FORWARD} {BACKWARD} W") for _ in range(3)).split()
    homes = {word for word in steps if word.startswith("gather") and word != "gather0"}
    assert homes == {"gather1@0", "gather2@1", "gather3@0"}


def test_reductions_follow_backward_order_and_the_root_comes_last() -> None:
    player = play()
    player(FORWARD)
    assert [word for word in player(BACKWARD).split() if word.startswith("reduce")] == [
        "reduce3",
        "reduce2",
        "reduce1",
        "reduce0",
    ]


def test_a_model_that_fits_into_the_slots_is_gathered_once_per_step() -> None:
    player = play(3)
    forward, backward = "F0> F1> F1< F2> F2< F0<", "B0> B2> G2 B1> G1 E"
    assert player(forward) == "gather0 wait0 gather1@0 wait1 gather2@1 wait2"
    assert player(backward) == "reduce2 reduce1 reduce0 finalise"
    assert player("W " + forward) == "release0 release1 release2 gather0 gather1@0 wait0 gather2@1 wait1 wait2"


def test_a_model_of_the_root_alone_is_gathered_and_reduced_once() -> None:
    assert play(1)("F0> F0< B0> E W") == "gather0 wait0 reduce0 finalise release0"


# ---- weights that do and do not change --------------------------------------------------------------------------


def test_accumulation_keeps_the_root_and_the_units_used_last() -> None:
    player = play()
    player(f"{FORWARD} {BACKWARD}")
    assert player(FORWARD) == "release1 gather3@0 wait3"
    assert player(BACKWARD) == STEADY_BACKWARD


def test_changed_weights_are_gathered_again_all_of_them() -> None:
    player = after_one_step()
    player(f"{FORWARD} {BACKWARD}")
    assert player("W") == "release0 release1 release2"
    assert player(FORWARD) == STEADY_FORWARD


def test_a_gather_under_way_is_waited_for_before_its_unit_is_released() -> None:
    player = after_one_step()
    player("F0> F0<")  # unit 1 was gathered ahead and nobody has waited for it
    assert player("W") == "release0 wait1 release1"


def test_weights_that_change_inside_a_forward_are_refused() -> None:
    player = play()
    player("F0> F1>")
    with pytest.raises(ScheduleError, match="the weights were changed inside a forward"):
        player("W")


def test_backward_of_a_forward_from_before_the_change_is_refused() -> None:
    player = play()
    player(f"{FORWARD} W")
    with pytest.raises(ScheduleError, match="ran before the weights were changed"):
        player("B0>")


def test_backward_of_a_forward_after_the_change_is_accepted() -> None:
    player = play(2)
    player("F0> F1> F1< F0< W F0> F1> F1< F0<")
    assert player("B0> B1> G1 E") == "reduce1 reduce0 finalise"


def test_evaluation_gathers_in_forward_order_and_reduces_nothing() -> None:
    player = play()
    player("F0> F1> f1< F2> f2< F3> f3< f0<")
    assert player("F0> F1> f1< F2> f2< F3> f3< f0<") == "release3 gather1@0 wait1 release1 gather3@0 wait3"


# ---- orders -----------------------------------------------------------------------------------------------------


def test_a_pass_in_another_order_gathers_on_demand_and_is_recorded_anew() -> None:
    player = after_one_step()
    other = "F0> F2> F2< F1> F1< F3> F3< F0<"
    # Unit 1 had been gathered ahead at the root, in vain for now; afterwards nothing is gathered ahead.
    assert player(other) == "gather0 gather1@0 wait0 gather2@1 wait2 wait1 release1 gather3@0 wait3"
    player("B0> B3> G3 B1> G1 B2> G2 E W")
    assert player(other) == "gather0 gather2@1 wait0 gather1@0 wait2 wait1 release1 gather3@0 wait3"


def test_a_skipped_unit_is_gathered_in_vain_once() -> None:
    player = after_one_step()
    skipping = "F0> F1> F1< F3> F3< F0<"
    assert player(skipping) == "gather0 gather1@0 wait0 gather2@1 wait1 release1 gather3@0 wait3"
    player("B0> B3> G3 B1> G1 E W")
    # Unit 3 cannot be gathered ahead of its use: unit 1, in use, has its slot.
    assert player(skipping) == "gather0 gather1@0 wait0 wait1 release1 gather3@0 wait3"


def test_a_backward_in_another_order_gathers_on_demand() -> None:
    player = after_one_step()
    player(FORWARD)
    assert player("B0> B2> G2 B3> G3 B1> G1 E") == "reduce2 reduce3 release3 gather1@0 wait1 reduce1 reduce0 finalise"


# ---- gradients --------------------------------------------------------------------------------------------------


def test_frozen_unit_is_gathered_for_backward_and_issues_no_reduce() -> None:
    player = play(trainable=(True, False, True, True))
    player(FORWARD)
    assert player("B0> B3> G3 B2> G2 B1> E") == "reduce3 reduce2 release3 gather1@0 wait1 reduce0 finalise"


def test_frozen_root_issues_no_reduce() -> None:
    player = play(3, trainable=(False, True, True))
    player("F0> F1> F1< F2> F2< F0<")
    assert player("B0> B2> G2 B1> G1 E") == "reduce2 reduce1 finalise"


def test_unit_with_missing_gradients_is_settled_when_the_next_unit_begins() -> None:
    player = play()
    player(FORWARD)
    assert player("B0> B3> G3 B2> g2") == "reduce3"
    assert player("B1>") == "reduce2 release3 gather1@0 wait1"


def test_unit_without_any_gradient_is_settled_too() -> None:
    player = play()
    player(FORWARD)
    assert player("B0> B3> B2> B1> E") == "reduce3 reduce2 release3 gather1@0 wait1 reduce1 reduce0 finalise"


def test_unit_that_backward_never_reached_issues_no_reduce() -> None:
    player = play(3)
    player("F0> F1> F1< F2> F2< F0<")
    assert player("B0> B2> G2 E") == "reduce2 reduce0 finalise"


def test_reused_unit_is_not_settled_before_its_last_backward() -> None:
    player = play(3)
    player("F0> F1> F1< F2> F2< F1> F1< F0<")
    assert player("B0> B1> g1 B2> G2 B1> G1 E") == "reduce2 reduce1 reduce0 finalise"


def test_late_gradients_of_a_reduced_unit_are_reduced_at_the_end() -> None:
    player = play(3)
    player("F0> F1> F1< F2> F2< F0<")
    assert player("B0> B2> B1> G1 g2 E") == "reduce2 reduce1 reduce2 reduce0 finalise"


def test_two_forwards_before_one_backward_reduce_each_unit_once() -> None:
    # One loss over two forwards: the gradients of a unit are ready after its second backward.
    player = play(3)
    player("F0> F1> F1< F2> F2< F0< F0> F1> F1< F2> F2< F0<")
    assert player("B0> B2> B1> B2> G2 B1> G1 E") == "reduce2 reduce1 reduce0 finalise"


def test_gradient_of_gathered_unit_without_announcement_is_reduced() -> None:
    player = play(2)
    player("F0> F1> F1< F0<")
    assert player("g1 G1 E") == "reduce1 reduce0 finalise"


def test_gradient_of_released_unit_without_announcement_is_refused() -> None:
    player = play()
    player(FORWARD)
    with pytest.raises(ScheduleError, match="a gradient arrived for a unit whose backward was never announced"):
        player("g1")


def test_late_reduction_reduces_everything_when_backward_is_over() -> None:
    player = play(reduces_early=False)
    player(FORWARD)
    assert player("B0> B3> G3 B2> G2 B1> G1") == "release3 gather1@0 wait1"
    assert player("E") == "reduce3 reduce2 reduce1 reduce0 finalise"


# ---- recomputation ----------------------------------------------------------------------------------------------


def test_recomputing_a_unit_inside_its_backward_asks_for_nothing_more() -> None:
    player = play()
    player(FORWARD)
    recomputing = "B0> B3> F3> F3< G3 B2> F2> f2< G2 B1> F1> f1< G1 E"
    assert player(recomputing) == "reduce3 reduce2 release3 gather1@0 wait1 reduce1 reduce0 finalise"
    player(f"W {FORWARD}")
    assert player(recomputing) == STEADY_BACKWARD


FORWARD_OF_FOUR = "F0> F1> F1< F2> F2< F3> F3< F4> F4< F0<"


def test_recomputing_two_units_together_gathers_both_once() -> None:
    player = play(5)
    player(FORWARD_OF_FOUR)
    assert player("B0> B4> F3> F3< F4> f4< G4 B3> G3") == "reduce4 reduce3"
    assert player("B2> F1> F1< F2> f2< G2 B1> G1 E") == (
        "release4 gather2@1 wait2 release3 gather1@0 wait1 reduce2 reduce1 reduce0 finalise"
    )


def test_reentrant_recomputation_announces_backward_after_the_second_forward() -> None:
    player = play(5)
    player("F0> F1> f1< F2> f2< F3> f3< F4> f4< F0<")
    assert player("B0> F3> F3< F4> F4< B4> G4 B3> G3") == "reduce4 reduce3"
    assert player("F1> F1< F2> F2< B2> G2 B1> G1 E") == (
        "release3 gather1@0 wait1 release4 gather2@1 wait2 reduce2 reduce1 reduce0 finalise"
    )


def test_a_longer_recomputation_than_there_are_slots_gathers_again() -> None:
    player = play()
    player("F0> F1> f1< F2> f2< F3> f3< F0<")
    assert player("B0> F1> F1< F2> F2< F3> F3< B3> G3 B2> G2 B1> G1 E") == (
        "release3 gather1@0 wait1 release1 gather3@0 wait3 reduce3 reduce2 release3 gather1@0 wait1 reduce1 reduce0 "
        "finalise"
    )


# ---- strategies -------------------------------------------------------------------------------------------------


def test_replicated_weights_are_gathered_in_place_once_per_step() -> None:
    player = play(shares_slots=False)
    assert player(FORWARD) == "gather0 wait0 gather1 wait1 gather2 wait2 gather3 wait3"
    assert player(BACKWARD) == "reduce3 reduce2 reduce1 reduce0 finalise"
    assert player(f"{FORWARD} {BACKWARD}") == "reduce3 reduce2 reduce1 reduce0 finalise"
    assert player("W") == "release0 release1 release2 release3"
    assert player(FORWARD) == "gather0 gather1 wait0 gather2 wait1 gather3 wait2 wait3"


def test_without_overlap_nothing_is_gathered_ahead() -> None:
    player = after_one_step(shares_slots=False, prefetch_forward=0, prefetch_backward=0)
    assert player(FORWARD) == "gather0 wait0 gather1 wait1 gather2 wait2 gather3 wait3"


def test_whole_weights_are_never_gathered() -> None:
    player = play(gathers=False, shares_slots=False)
    assert player(f"P1 A1 {FORWARD}") == ""
    assert player(BACKWARD) == "reduce3 reduce2 reduce1 reduce0 finalise"
    assert player("W") == ""


# ---- more slots, more depth -------------------------------------------------------------------------------------


def test_three_slots_and_depth_two_gather_two_units_ahead() -> None:
    player = play(5, slots=3, prefetch_forward=2, prefetch_backward=2)
    player(f"{FORWARD_OF_FOUR} B0> B4> G4 B3> G3 B2> G2 B1> G1 E W")
    assert player(FORWARD_OF_FOUR) == (
        "gather0 gather1@0 gather2@1 wait0 gather3@2 wait1 release1 gather4@0 wait2 wait3 wait4"
    )
    assert player("B0> B4> G4 B3> G3 B2> G2 B1> G1 E") == (
        "reduce4 release4 gather1@0 reduce3 reduce2 wait1 reduce1 reduce0 finalise"
    )


def test_one_slot_leaves_no_room_to_gather_ahead() -> None:
    player = after_one_step(slots=1)
    assert player(FORWARD) == "gather0 gather1@0 wait0 wait1 release1 gather2@0 wait2 release2 gather3@0 wait3"
    assert player(BACKWARD) == (
        "reduce3 release3 gather2@0 wait2 reduce2 release2 gather1@0 wait1 reduce1 reduce0 finalise"
    )


# ---- asked from outside, broken off -----------------------------------------------------------------------------


def test_weights_wanted_ahead_are_only_waited_for_by_the_forward() -> None:
    player = play()
    assert player("P0 P1 P2") == "gather0 gather1@0 gather2@1"
    assert player("F0> F1>") == "wait0 wait1"


def test_weights_wanted_ahead_do_not_drive_out_what_was_gathered_for_them() -> None:
    player = play()
    player("P0 P1 P2")
    assert player("P3") == ""


def test_weights_awaited_are_gathered_and_waited_for_once() -> None:
    player = play()
    assert player("A1 A1") == "gather1@0 wait1"


def test_reset_in_forward_brings_everything_to_rest() -> None:
    player = play()
    player("F0> F1> F1< F2>")
    assert player("R") == "release0 release1 release2"
    assert not player.scheduler.in_forward
    assert player(FORWARD) == "gather0 wait0 gather1@0 wait1 gather2@1 wait2 release1 gather3@0 wait3"


def test_reset_in_backward_forgets_what_was_not_reduced_and_learnt() -> None:
    player = after_one_step()
    player(f"{FORWARD} B0> B3> G3 B2> g2")
    player("R")
    assert not player.scheduler.in_backward
    # Other ranks may have been stopped elsewhere: all begin anew, and so decide alike.
    assert player(f"{FORWARD} {BACKWARD} W") == play()(f"{FORWARD} {BACKWARD} W")
    assert player(f"{FORWARD} {BACKWARD}") == f"{STEADY_FORWARD} {STEADY_BACKWARD}"


def test_forward_from_before_a_reset_cannot_be_run_backward() -> None:
    player = play()
    player(f"{FORWARD} R")
    with pytest.raises(ScheduleError, match="before the weights were changed"):
        player("B3>")


# ---- the operations themselves ----------------------------------------------------------------------------------


def test_operations_read_as_in_these_tests() -> None:
    assert str(Operation(Action.GATHER, 3, 1)) == "gather3@1"
    assert str(Operation(Action.GATHER, 3)) == "gather3"
    assert str(Operation(Action.FINALISE, 0)) == "finalise"


def test_scheduler_tells_how_deep_a_unit_is_called() -> None:
    scheduler = Scheduler(ScheduleConfig((True, True)))
    scheduler.forward_begins(0)
    scheduler.forward_begins(1)
    scheduler.forward_begins(1)
    assert (scheduler.in_forward, scheduler.forward_depth(1), scheduler.forward_depth(0)) == (True, 2, 1)
