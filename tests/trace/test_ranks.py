"""Several ranks beside each other, with timelines made by hand."""

from dataclasses import replace

import pytest

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.files import chrome_events
from megatron_fsdp.trace.summary import Row, Times, common_steps, compare
from megatron_fsdp.trace.timeline import StepWindow, Timeline
from tests.trace.synthetic import EMPTY, KNOWN, collective, span

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


def test_a_recording_that_lacks_something_says_so() -> None:
    assert compare([KNOWN, replace(OTHER, is_cut=True)]).is_cut
    assert not compare([KNOWN, OTHER]).is_cut
