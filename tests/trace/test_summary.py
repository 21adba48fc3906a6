"""Numbers of timelines whose answers are known, and what holds for all."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.files import chrome_events
from megatron_fsdp.trace.summary import (
    COLUMNS,
    Row,
    Times,
    common_steps,
    compare,
    covered,
    hidden_part,
    own_times,
    summarise,
    union,
)
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
    summary = summarise(KNOWN)
    root = Times(compute=700 - 50 - 300, update=200)
    layer = Times(gather=50, wait=80, compute=300 - 80)
    assert summary.units == (
        Row(0, 0, 0, root, duration_ns=550, memory_bytes=64),
        Row(0, 1, 0, layer, duration_ns=350, exposed_ns=10 + 50, collectives=1, gather_bytes=100, memory_bytes=96),
    )
    (step,) = summary.steps
    assert step == Row(
        0,
        None,
        0,
        Times(gather=50, wait=80, compute=350 + 220, update=200),
        duration_ns=1000,
        communication_ns=360,
        exposed_ns=60,
        collectives=1,
        gather_bytes=100,
        memory_bytes=96,
    )
    assert (step.outside_ns, step.own_ns, step.sent_bytes) == (100, 920, 100)
    assert summary.hidden == pytest.approx(1 - 60 / 360)
    assert summarise(replace(KNOWN, clock="stream")).steps[0].exposed_ns == 50  # on streams a launch holds nobody up
    assert summarise(replace(KNOWN, collectives=())).hidden is None
    assert hidden_part(()) is None


def test_collectives_in_flight_together_count_once() -> None:
    both = (collective((100, 100), 300, (250, 300, 300)), collective((200, 200), 400, (300, 360, 400)))
    step = summarise(replace(EMPTY, collectives=both)).steps[0]
    assert (step.communication_ns, step.exposed_ns) == (300, 50 + 60)


def test_communication_of_two_steps_is_cut_at_the_border_and_waits_count_where_they_are() -> None:
    windows = (StepWindow(4, 0, 500), StepWindow(5, 500, 1000))
    crossing = collective((400, 410), 700, (600, 700, 700), step=4, wait_step=5)
    first, second = summarise(replace(EMPTY, steps=windows, collectives=(crossing,))).steps
    assert (first.communication_ns, first.exposed_ns, first.gather_bytes) == (100, 10, 100)
    assert (second.communication_ns, second.exposed_ns, second.gather_bytes) == (200, 100, 0)


def test_what_was_never_waited_for_counts_its_bytes_only_and_what_has_come_is_not_exposed() -> None:
    lost = collective((100, 110), None, None)
    step = summarise(replace(EMPTY, collectives=(lost,))).steps[0]
    assert (step.communication_ns, step.exposed_ns, step.collectives, step.gather_bytes) == (0, 0, 1, 100)
    late = collective((100, 100), 200, (500, 510, 510))
    step = summarise(replace(EMPTY, collectives=(late,))).steps[0]
    assert (step.communication_ns, step.exposed_ns, step.hidden) == (100, 0, 1.0)


def test_every_phase_has_a_column() -> None:
    assert set(COLUMNS) == set(PHASES)
    assert set(COLUMNS) >= {phase.value for phase in Phase}
    assert set(COLUMNS.values()) == set(Times.__dataclass_fields__)


def test_children_of_a_phase_that_an_exception_ended_take_nothing_from_others() -> None:
    spans = [span("forward", 0, 100), span("wait", 150, 170, depth=1), span("copy", 155, 160, depth=2)]
    assert own_times(spans) == [100, 15, 5]


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
def test_units_add_up_to_their_step_and_time_counts_once(timeline: Timeline) -> None:
    summary = summarise(timeline)
    (step,) = summary.steps
    assert Times.sum(unit.times for unit in summary.units) == step.times
    assert step.times.total + step.outside_ns == step.duration_ns == 1000
    assert step.times.total == len(moments([(one.start_ns, one.end_ns) for one in timeline.spans if not one.depth]))
    assert all(value >= 0 for value in own_times(timeline.spans))
    flying = moments([one.in_flight for one in timeline.collectives if one.in_flight])
    held_up = moments([one.blocked for one in timeline.collectives if one.blocked])
    held_up |= moments([one.launch for one in timeline.collectives])
    assert step.communication_ns == len(flying)
    assert step.exposed_ns == len(flying & held_up) == sum(unit.exposed_ns for unit in summary.units)
    assert step.gather_bytes == sum(one.num_bytes for one in timeline.collectives)
    assert summary.hidden is None if not flying else summary.hidden == 1 - len(flying & held_up) / len(flying)


# ---- several ranks ---------------------------------------------------------------------------------------------------

# Rank 1 computes 100 ns longer on layer 0, and waits 80 ns less.
OTHER = replace(
    EMPTY,
    rank=1,
    spans=(
        span("forward", 0, 700),
        span("gather", 100, 150, depth=1, unit=1, num_bytes=100),
        span("forward", 280, 600, depth=1, unit=1),
        span("optimizer", 700, 900),
        span("install", 800, 900, depth=1),
    ),
    collectives=(collective((110, 120), 200, (480, 480, 480)),),
)


def test_means_slowest_and_skew_by_hand() -> None:
    found = compare([KNOWN, OTHER])
    first, second = found.ranks
    assert (first.duration_ns, first.own_ns, first.sent_bytes, first.memory_bytes) == (1000, 920, 100, 96)
    assert (second.duration_ns, second.own_ns, second.sent_bytes, second.memory_bytes) == (1000, 1000, 100, None)
    assert (first.hidden, second.hidden) == (1 - 60 / 360, 1 - 10 / 90)
    assert found.hidden == 1 - 70 / 450
    assert (found.slowest_rank, found.skew_ns) == (1, 80)
    root = Times(compute=(350 + 330) // 2, update=200)
    layer = Times(gather=50, wait=40, compute=(220 + 320) // 2)
    assert found.units == (
        Row(None, 0, None, root, duration_ns=540, memory_bytes=64),
        Row(None, 1, None, layer, duration_ns=360, exposed_ns=35, collectives=1, gather_bytes=100, memory_bytes=96),
    )
    assert found.unit_skews_ns == (20, 100)
    assert found.slowest_unit == "(root)"  # 340 ns without the optimizer; of the 360 of layers.0, 40 are waits
    assert found.steps == (0,)
    assert not found.is_cut
    assert compare([KNOWN, replace(OTHER, is_cut=True)]).is_cut


def test_means_are_over_the_steps_of_all_ranks_or_the_one_asked_for() -> None:
    two = (StepWindow(0, 0, 500), StepWindow(1, 500, 1000))
    first = replace(EMPTY, steps=two, spans=(span("forward", 0, 100), span("forward", 500, 800, step=1)))
    second = replace(EMPTY, rank=1, steps=two[1:], spans=(span("forward", 500, 700, step=1),))
    found = compare([first, second])
    assert found.steps == (1,)
    assert [rank.times.compute for rank in found.ranks] == [300, 200]
    alone = compare([first])
    assert alone.steps == (0, 1)
    assert alone.ranks[0].times.compute == 200
    assert compare([first], step=0).ranks[0].times.compute == 100
    assert alone.units[0].times.compute == 200
    with pytest.raises(TraceError, match="step 0 was not recorded; those of all ranks are 1"):
        common_steps([first, second], 0)
    with pytest.raises(TraceError, match="different steps; start all of them together"):
        common_steps([replace(first, steps=two[:1]), second])
    with pytest.raises(TraceError, match="step 3 was not recorded; ranks share none"):
        common_steps([replace(first, steps=two[:1]), second], 3)
    with pytest.raises(TraceError, match="no timeline was given"):
        compare([])


def test_aligned_ranks_share_a_clock_and_others_are_shifted_by_their_wall_clocks() -> None:
    def starts(*timelines: Timeline) -> list[tuple[int, float]]:
        return [(e["pid"], e["ts"]) for e in chrome_events(timelines) if e["name"] == "step 0"]

    late = replace(OTHER, started_unix_ns=KNOWN.started_unix_ns + 250)
    assert starts(KNOWN, late) == [(0, 0.0), (1, 0.0)]
    assert starts(replace(KNOWN, is_aligned=False), late) == [(0, 0.0), (1, 0.25)]
