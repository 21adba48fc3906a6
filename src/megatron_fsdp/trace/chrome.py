"""Timelines as trace events, which Perfetto and chrome://tracing show.

Format: "Trace Event Format", Google, 2016: events "X" (complete), "C" (counter), "s" and "f" (flow) and "M" (metadata),
with times in microseconds. A rank is a process. Its threads are the steps, the compute side, and the lanes; complete
events of one thread have to nest, so a lane has as many threads as it had collectives in flight at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_fsdp.trace.timeline import BLOCKED, LANES, OPTIMIZER, Collective, Span, Timeline

STEPS_THREAD, COMPUTE_THREAD = 0, 1
_FIRST_LANE_THREAD = 100
_THREADS_PER_LANE = 1000
_FLOWS_PER_RANK = 1_000_000_000

Event = dict[str, Any]


def chrome_events(timelines: Iterable[Timeline]) -> list[Event]:
    """All events of some ranks.

    Args:
        timelines: One per rank.

    Returns:
        Events as JSON values: metadata first, then by time.
    """
    events = [event for timeline in timelines for event in _events_of(timeline)]
    return sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0)))


def _events_of(timeline: Timeline) -> Iterator[Event]:
    yield from _process(timeline)
    yield _thread(timeline, STEPS_THREAD, "steps")
    for window in timeline.steps:
        yield _complete(
            timeline, STEPS_THREAD, f"step {window.index}", "step", window.start_ns, window.end_ns - window.start_ns
        )
    yield _thread(timeline, COMPUTE_THREAD, "compute")
    for span in timeline.spans:
        yield _phase(timeline, span)
    for place, lane in enumerate(LANES):
        yield from _lane(timeline, place, [one for one in timeline.collectives if one.lane == lane])
    for sample in timeline.memory:
        yield {
            "ph": "C",
            "name": f"bytes {timeline.memory_kind}",
            "pid": timeline.rank,
            "ts": _us(sample.time_ns),
            "args": {"bytes": sample.num_bytes},
        }


def _phase(timeline: Timeline, span: Span) -> Event:
    whole_model = span.phase == OPTIMIZER
    name = span.phase if whole_model else f"{span.phase} {timeline.units[span.unit]}"
    event = _complete(timeline, COMPUTE_THREAD, name, span.phase, span.start_ns, span.duration_ns)
    event["args"] = {"unit": timeline.units[span.unit], "step": span.step, "bytes": span.num_bytes}
    return event


def _lane(timeline: Timeline, place: int, collectives: Sequence[Collective]) -> Iterator[Event]:
    flying = [(one, one.in_flight) for one in collectives]
    intervals = [interval for _, interval in flying if interval is not None]
    known = [one for one, interval in flying if interval is not None]
    for one, row, (start_ns, end_ns) in zip(known, stack_rows(intervals), intervals, strict=True):
        thread = _FIRST_LANE_THREAD + _THREADS_PER_LANE * place + row
        name = f"{one.purpose} {timeline.units[one.unit]}"
        event = _complete(timeline, thread, name, f"collective,{one.purpose}", start_ns, end_ns - start_ns)
        event["args"] = {
            "unit": timeline.units[one.unit],
            "step": one.step,
            "bytes": one.num_bytes,
            "axis": one.axis,
            "number": one.number,
        }
        yield event
        yield from _arrow(timeline, one, thread)
    for row in range(1 + max(stack_rows(intervals), default=-1)):
        thread = _FIRST_LANE_THREAD + _THREADS_PER_LANE * place + row
        yield _thread(timeline, thread, f"{LANES[place]} lane" + (f" ({row + 1})" if row else ""))


def _arrow(timeline: Timeline, one: Collective, thread: int) -> Iterator[Event]:
    """From a collective to the wait for it."""
    if one.wait_ns is None or one.blocked is None:
        return
    common = {
        "name": BLOCKED,
        "cat": "flow",
        "pid": timeline.rank,
        "id": timeline.rank * _FLOWS_PER_RANK + one.number,
    }
    yield {"ph": "s", "tid": thread, "ts": _us(one.launch_ns), **common}
    yield {"ph": "f", "bp": "e", "tid": COMPUTE_THREAD, "ts": _us(one.wait_ns), **common}


def stack_rows(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Put each interval into the first row where nothing else lies at that time.

    Args:
        intervals: (start, end), by start.

    Returns:
        The row of each.
    """
    ends: list[int] = []
    rows = []
    for start, end in intervals:
        row = next((row for row, taken_until in enumerate(ends) if taken_until <= start), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        rows.append(row)
    return rows


def _process(timeline: Timeline) -> Iterator[Event]:
    name = f"rank {timeline.rank} ({timeline.device})"
    yield {"ph": "M", "name": "process_name", "pid": timeline.rank, "tid": 0, "args": {"name": name}}
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": timeline.rank,
        "tid": 0,
        "args": {"sort_index": timeline.rank},
    }


def _thread(timeline: Timeline, thread: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": timeline.rank, "tid": thread, "args": {"name": name}}


def _complete(timeline: Timeline, thread: int, name: str, kind: str, start_ns: int, duration_ns: int) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": timeline.rank,
        "tid": thread,
        "ts": _us(start_ns),
        "dur": _us(duration_ns),
    }


def _us(time_ns: int) -> float:
    return time_ns / 1000
