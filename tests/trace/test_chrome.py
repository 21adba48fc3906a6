"""Trace events, by the rules of their format."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from megatron_fsdp.trace.files import COMPUTE_THREAD, STEPS_THREAD, chrome_events, stack_rows
from megatron_fsdp.trace.timeline import Timeline
from tests.trace.synthetic import KNOWN, collective
from tests.trace.test_summary import INTERVALS, nested_timelines

NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def check(events: list[dict[str, Any]]) -> None:
    """Raise AssertionError where events break a rule of the format, or come in no order."""
    assert events == json.loads(json.dumps(events, allow_nan=False))
    named, starts, ends = set(), defaultdict(list), defaultdict(list)
    threads = defaultdict(list)
    for event in events:
        assert event.keys() - {"args"} == NEEDED[event["ph"]] - {"args"} | {"ph"}, event
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        elif event["ph"] in "sf":
            (starts if event["ph"] == "s" else ends)[event["id"]].append(event)
    stamps = [event["ts"] for event in events if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    for process, thread in threads:
        assert ("process_name", process, 0) in named
        assert ("thread_name", process, thread) in named
    for found in threads.values():
        _check_nesting(found)
    assert starts.keys() == ends.keys()
    for key, (start,) in starts.items():
        (end,) = ends[key]
        assert start["ts"] <= end["ts"]
        assert start["name"] == end["name"]


def _check_nesting(events: list[tuple[float, float]]) -> None:
    """Complete events of one thread lie in each other or beside each other."""
    around: list[float] = []
    for start, minus_duration in sorted(events):
        end = start - minus_duration
        while around and around[-1] <= start + 1e-9:
            around.pop()
        assert not around or end <= around[-1] + 1e-6
        around.append(end)


def test_a_timeline_as_events() -> None:
    events = chrome_events([KNOWN])
    check(events)
    complete = {(e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    lane = complete[100, "gather layers.0"]
    assert (lane["ts"], lane["dur"]) == (0.11, 0.36)  # microseconds
    assert lane["args"] == {"unit": "layers.0", "step": 0, "bytes": 100, "axis": "dp", "number": 0}
    launch = complete[COMPUTE_THREAD, "gather layers.0"]
    assert (launch["ts"], launch["dur"], launch["args"]["bytes"]) == (0.1, 0.05, 100)
    assert complete[STEPS_THREAD, "step 0"]["dur"] == 1.0
    assert (COMPUTE_THREAD, "optimizer") in complete
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"] == [64, 96, 80]
    arrow = [(e["ph"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrow == [("s", 100, 0.11), ("f", COMPUTE_THREAD, 0.42)]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {STEPS_THREAD: "steps", COMPUTE_THREAD: "compute", 100: "gather lane"}


def test_collectives_that_overlap_get_threads_of_their_own() -> None:
    both = (collective((100, 100), 300, None), collective((200, 200), 400, None, number=1))
    events = chrome_events([replace(KNOWN, collectives=both)])
    check(events)
    assert {e["tid"] for e in events if e["ph"] == "X" and e["tid"] >= 100} == {100, 101}
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert "gather lane (2)" in names


def test_ranks_are_processes_and_their_arrows_have_different_ids() -> None:
    events = chrome_events([KNOWN, replace(KNOWN, rank=1)])
    check(events)
    assert {e["pid"] for e in events} == {0, 1}
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2


@settings(max_examples=40)
@given(nested_timelines())
def test_any_timeline_makes_good_events(timeline: Timeline) -> None:
    check(chrome_events([timeline, replace(timeline, rank=7)]))


@given(INTERVALS)
def test_rows_keep_apart_what_overlaps_and_are_few(intervals: list[tuple[int, int]]) -> None:
    ordered = sorted(intervals)
    rows = stack_rows(ordered)
    for row in set(rows):
        mine = [interval for interval, place in zip(ordered, rows, strict=True) if place == row]
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(mine))
    together = max((sum(start <= t < end for start, end in ordered) for t in range(61)), default=0)
    assert max(rows, default=-1) + 1 <= max(together, 1 if ordered else 0) + sum(s == e for s, e in ordered)


def test_the_check_refuses_what_does_not_nest() -> None:
    events = chrome_events([KNOWN])
    longer = [{**e, "dur": 0.9} if e["name"] == "gather layers.0" and e["tid"] == 1 else e for e in events]
    with pytest.raises(AssertionError):
        check(longer)
