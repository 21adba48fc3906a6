"""When buckets are gathered and reduced: events in, operations out, without a process."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.ddp.bucket_schedule import BucketScheduler, GatherMode
from megatron_fsdp.engine.schedule import Operation, ScheduleConfig
from megatron_fsdp.errors import ScheduleError

BUCKETS = 4


def make(
    mode: GatherMode = GatherMode.AT_ONCE, early: bool = True, gathers: bool = True, counts: tuple[int, ...] = ()
) -> BucketScheduler:
    counts = counts or (0, 1, 2, 1, 1)
    config = ScheduleConfig(
        trainable=tuple(count > 0 for count in counts), gathers=gathers, shares_slots=False, reduces_early=early
    )
    return BucketScheduler(config, counts, mode)


def text(operations: Iterable[Operation]) -> str:
    return " ".join(str(operation) for operation in operations)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_gathered_as_the_mode_says() -> None:
    scheduler = make(GatherMode.AT_ONCE)
    assert text(scheduler.forward_opens()) == "gather0 gather1 gather2 gather3 gather4 wait0 wait1 wait2 wait3 wait4"
    assert text(scheduler.weights_read({2, 3})) == ""
    assert text(scheduler.forward_closes()) == ""
    scheduler = make(GatherMode.TOGETHER)
    assert text(scheduler.forward_opens()) == "gather0 gather1 gather2 gather3 gather4"
    assert text(scheduler.weights_read({2, 1})) == "wait1 wait2"
    assert text(scheduler.weights_read({2, 4})) == "wait4"
    scheduler = make(GatherMode.IN_TURN)
    assert text(scheduler.forward_opens()) == "gather0 gather1"
    assert text(scheduler.weights_read({1})) == "gather2 wait1"
    assert text(scheduler.weights_read({1})) == ""
    assert text(scheduler.weights_read({2})) == "gather3 wait2"
    assert text(scheduler.weights_read({3, 4})) == "gather4 wait3 wait4"


def test_weights_that_changed_are_gathered_again_and_whole_ones_never() -> None:
    scheduler = make(GatherMode.IN_TURN)
    scheduler.forward_opens()
    for bucket in range(1, BUCKETS + 1):
        scheduler.weights_read({bucket})
    assert text(scheduler.forward_opens()) == ""
    assert text(scheduler.weights_changed()) == "wait0 release0 release1 release2 release3 release4"
    assert text(scheduler.forward_opens()) == "gather0 gather1"
    for mode in GatherMode:
        scheduler = make(mode, gathers=False)
        assert text(scheduler.forward_opens()) == ""
        assert text(scheduler.weights_read({1, 4})) == ""
        assert text(scheduler.everything()) == ""
        assert text(scheduler.forward_closes()) == ""


@given(st.sampled_from(GatherMode), st.lists(st.sets(st.integers(0, BUCKETS)), max_size=8))
def test_whatever_is_read_gathers_run_in_one_order_and_before_they_are_needed(
    mode: GatherMode, reads: list[set[int]]
) -> None:
    scheduler = make(mode)
    started = list(scheduler.forward_opens())
    for units in reads:
        started += scheduler.weights_read(units)
        waited = {operation.unit for operation in started if operation.action.value == "wait"}
        assert units <= waited
    started += scheduler.forward_closes()
    gathers = [operation.unit for operation in started if operation.action.value == "gather"]
    assert gathers == list(range(BUCKETS + 1))


# ---- gradients -------------------------------------------------------------------------------------------------------


def backward(scheduler: BucketScheduler, *arrivals: tuple[int, int]) -> list[str]:
    """One backward; what each gradient (bucket, parameter) sets off, and then the end."""
    scheduler.forward_begins(0)
    weights_version = scheduler.forward_ends(0, needs_backward=True)
    found = [text(scheduler.backward_begins(0, weights_version))]
    filling: set[int] = set()
    for bucket, parameter in arrivals:
        if bucket not in filling:
            scheduler.gradient_arrives(bucket)
            filling.add(bucket)
        operations = scheduler.gradient_counted(bucket, parameter)
        filling -= {operation.unit for operation in operations}
        found.append(text(operations))
    return [*found, text(scheduler.backward_ends())]


IN_ORDER = ((4, 0), (3, 0), (2, 1), (2, 0), (1, 0))
AT_THE_END = "reduce4 reduce3 reduce2 reduce1 finalise"


def test_the_first_backward_reduces_at_its_end_and_the_next_as_soon_as_a_bucket_is_complete() -> None:
    scheduler = make()
    assert backward(scheduler, *IN_ORDER)[-1] == AT_THE_END
    for _ in range(2):
        assert backward(scheduler, *IN_ORDER)[1:] == ["reduce4", "reduce3", "", "reduce2", "reduce1", "finalise"]
    scheduler = make(early=False)
    for _ in range(3):
        assert backward(scheduler, *IN_ORDER) == ["", "", "", "", "", "", AT_THE_END]
    scheduler = make(counts=(0, 1, 0, 1))
    for _ in range(2):
        found = backward(scheduler, (3, 0), (1, 0))
        assert " ".join(filter(None, found)) == "reduce3 reduce1 finalise"


def test_a_bucket_waits_for_its_gradients_and_for_buckets_behind_it() -> None:
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    found = backward(scheduler, (1, 0), (2, 0), (3, 0), (2, 1), (4, 0))
    assert found[1:] == ["", "", "", "", "reduce4 reduce3 reduce2 reduce1", "finalise"]
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    assert backward(scheduler, (4, 0), (3, 0), (2, 1), (1, 0))[1:] == [
        "reduce4",
        "reduce3",
        "",
        "",
        "reduce2 reduce1 finalise",
    ]
    assert backward(scheduler)[-1] == AT_THE_END  # also where none comes at all


def test_gradients_that_come_several_times_are_counted_and_awaited() -> None:
    scheduler = make()
    often = ((4, 0), (3, 0), (3, 0), (3, 0), (2, 0), (2, 1), (1, 0))
    backward(scheduler, *often)
    assert backward(scheduler, *often)[1:] == ["reduce4", "", "", "reduce3", "", "reduce2", "reduce1", "finalise"]
    assert backward(scheduler, *IN_ORDER)[-1] == "reduce3 reduce2 reduce1 finalise"


def test_more_gradients_than_ever_before_are_refused_and_learnt_after_a_reset() -> None:
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    with pytest.raises(ScheduleError, match=r"a gradient arrived after its bucket was reduced.*use_reentrant=False"):
        backward(scheduler, (4, 0), (4, 0))
    scheduler = make()
    backward(scheduler, *IN_ORDER)
    scheduler.forward_begins(0)
    scheduler.backward_begins(0, scheduler.forward_ends(0, needs_backward=True))
    scheduler.gradient_arrives(4)
    scheduler.gradient_counted(4, 0)
    scheduler.reset()
    assert backward(scheduler, *IN_ORDER)[-1] == AT_THE_END
    assert backward(scheduler, *IN_ORDER)[1] == "reduce4"


_ARRIVALS = [(4, 0), (3, 0), (2, 0), (2, 1), (1, 0)]


@given(st.lists(st.tuples(st.randoms(use_true_random=False), st.sets(st.sampled_from(_ARRIVALS))), max_size=6))
def test_whatever_comes_buckets_are_reduced_once_from_the_last_to_the_first(
    steps: list[tuple[random.Random, set[tuple[int, int]]]],
) -> None:
    scheduler = make()
    for rng, missing in steps:
        arrivals = [arrival for arrival in _ARRIVALS if arrival not in missing]
        rng.shuffle(arrivals)
        assert " ".join(filter(None, backward(scheduler, *arrivals))) == AT_THE_END
