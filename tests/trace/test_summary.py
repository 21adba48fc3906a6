"""Numbers of timelines whose answers are known, and what holds for all."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.trace.summary import StepTimes, covered, hidden_part, summarise, union
from megatron_fsdp.trace.timeline import PHASES, Interval, Span, StepWindow, Timeline
from tests.trace.synthetic import EMPTY, KNOWN, collective, span

MOMENTS = 60
INTERVALS = st.lists(
    st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS)).map(lambda ends: (min(ends), max(ends))), max_size=12
)


def moments(intervals: list[Interval]) -> set[int]:
    """The definition, one nanosecond after another."""
    return {moment for start, end in intervals for moment in range(start, end)}


@given(INTERVALS, st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS)))
def test_unions_and_what_they_cover_are_sets_of_moments(intervals: list[Interval], window: Interval) -> None:
    found = union(intervals)
    assert moments(found) == moments(intervals)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(found))
    assert covered(window, found) == len(moments(intervals) & set(range(*window)))


def test_a_step_worked_out_by_hand() -> None:
    (step,) = summarise(KNOWN)
    assert step == StepTimes(0, 0, duration_ns=1000, communication_ns=360, exposed_ns=10 + 50)
    assert step.hidden == pytest.approx(1 - 60 / 360)
    assert summarise(replace(KNOWN, clock="stream"))[0].exposed_ns == 50  # on streams a launch holds nobody up
    assert summarise(replace(KNOWN, collectives=()))[0].hidden is None
    assert hidden_part(()) is None
    assert hidden_part((step, replace(step, communication_ns=90, exposed_ns=10))) == 1 - 70 / 450


def test_communication_of_two_steps_is_cut_at_the_border_and_waits_count_where_they_are() -> None:
    windows = (StepWindow(4, 0, 500), StepWindow(5, 500, 1000))
    crossing = collective((400, 410), 700, (600, 700, 700), step=4, wait_step=5)
    first, second = summarise(replace(EMPTY, steps=windows, collectives=(crossing,)))
    assert (first.step, first.communication_ns, first.exposed_ns) == (4, 100, 10)
    assert (second.step, second.communication_ns, second.exposed_ns) == (5, 200, 100)


def test_what_was_never_waited_for_does_not_count_and_what_has_come_is_not_exposed() -> None:
    lost = collective((100, 110), None, None)
    (step,) = summarise(replace(EMPTY, collectives=(lost,)))
    assert (step.communication_ns, step.exposed_ns) == (0, 0)
    late = collective((100, 100), 200, (500, 510, 510))
    (step,) = summarise(replace(EMPTY, collectives=(late,)))
    assert (step.communication_ns, step.exposed_ns, step.hidden) == (100, 0, 1.0)


@st.composite
def nested_timelines(draw: st.DrawFn) -> Timeline:
    """Phases that nest at random, and collectives that are launched and waited for one after another."""
    spans: list[Span] = []

    def fill(start: int, end: int, depth: int) -> None:
        while start < end and len(spans) < 40:
            start = draw(st.integers(start, end))
            stop = draw(st.integers(start, end))
            spans.append(span(draw(st.sampled_from(PHASES)), start, stop, depth, draw(st.integers(0, 2))))
            if depth < 3 and draw(st.booleans()):
                fill(start, stop, depth + 1)
            start = stop + 1

    fill(0, 1000, 0)
    collectives, now = [], 0
    for number in range(draw(st.integers(0, 6))):
        launch, launched, wait, arrived = sorted(draw(st.lists(st.integers(now, 1000), min_size=4, max_size=4)))
        done = draw(st.integers(launch, arrived))
        unit = draw(st.integers(0, 2))
        collectives.append(
            collective((launch, launched), done, (wait, arrived, arrived), number=number, unit=unit, num_bytes=number)
        )
        now = arrived
    spans.sort(key=lambda one: (one.start_ns, one.depth))
    return replace(EMPTY, spans=tuple(spans), collectives=tuple(collectives))


@settings(max_examples=40)
@given(nested_timelines())
def test_time_counts_once(timeline: Timeline) -> None:
    (step,) = summarise(timeline)
    flying = moments([one.in_flight for one in timeline.collectives if one.in_flight])
    held_up = moments([one.blocked for one in timeline.collectives if one.blocked])
    held_up |= moments([one.launch for one in timeline.collectives])
    assert step.duration_ns == 1000
    assert step.communication_ns == len(flying)
    assert step.exposed_ns == len(flying & held_up)
    assert step.hidden is None if not flying else step.hidden == 1 - len(flying & held_up) / len(flying)
