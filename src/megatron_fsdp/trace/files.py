"""A folder of traces: `trace-rank{r}.json` of every rank, trace events for viewers and the times of its steps.

Perfetto and chrome://tracing show the events ("Trace Event Format", Google, 2016): "X" (complete), "C" (counter), "s"
and "f" (flow) and "M" (metadata), with times in microseconds. A rank is a process. Its threads are the steps, the
compute side, and the streams; complete events of one thread have to nest, so a stream has as many threads as it had
collectives in flight at a time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.summary import StepTimes, summarise
from megatron_fsdp.trace.timeline import BLOCKED, OPTIMIZER, STREAMS, Interval, Timeline

STEPS_THREAD, COMPUTE_THREAD = 0, 1
_FIRST_LANE_THREAD = 100
_THREADS_PER_LANE = 1000
_FLOWS_PER_RANK = 1_000_000_000

Event = dict[str, Any]

KEY = "megatronFsdpTimeline"
"""The key of the part of the file that viewers ignore."""

FORMAT = 4
_NAME = re.compile(r"trace-rank(\d+)\.json")


@dataclass(frozen=True)
class RankTrace:
    """The content of one rank's trace: its timeline's fields, the times of its steps, and its trace events."""

    rank: int
    world_size: int
    device: str
    started_unix_ns: int
    is_aligned: bool
    is_cut: bool
    recording: str
    peers: tuple[int, ...]
    steps: tuple[StepTimes, ...]
    events: tuple[Event, ...]


_OF_TIMELINE = tuple(field.name for field in fields(RankTrace) if field.name not in ("steps", "events"))


def write_timeline(folder: str | os.PathLike[str], timeline: Timeline) -> Path:
    """Write one rank's timeline as `trace-rank{r}.json`, which Perfetto opens, and return its path.

    The folder, the same for all ranks, is created if needed; an older file is replaced.
    """
    path = Path(folder) / f"trace-rank{timeline.rank}.json"
    given = {name: getattr(timeline, name) for name in _OF_TIMELINE}
    steps = [asdict(step) for step in summarise(timeline)]
    _write(path, {"traceEvents": chrome_events(timeline), KEY: {"format": FORMAT, **given, "steps": steps}})
    return path


def merge_traces(path: str | os.PathLike[str], traces: Sequence[RankTrace]) -> None:
    """Write the trace events of several ranks into one file, for viewers.

    Ranks that were aligned share a clock; others are shifted by the difference of their wall clocks at the start.
    """
    first_ns = min((trace.started_unix_ns for trace in traces), default=0)
    are_aligned = all(trace.is_aligned for trace in traces)
    events: list[Event] = []
    for trace in traces:
        shift_us = 0.0 if are_aligned else _us(trace.started_unix_ns - first_ns)
        events += [event | {"ts": event["ts"] + shift_us} if "ts" in event else event for event in trace.events]
    _write(Path(path), {"traceEvents": sorted(events, key=_place)})


def read_traces(folder: str | os.PathLike[str], *, partial: bool = False) -> tuple[RankTrace, ...]:
    """Read the traces that `write_timeline` wrote into a folder, by rank.

    With `partial` some files may be missing. Where ranks were not aligned, files may always be missing, since only some
    of the ranks may have recorded.

    Raises:
        TraceError: A file is missing, damaged or of another recording.
    """
    place = Path(folder)
    if not place.is_dir():
        raise TraceError(f"{place} is not a folder; give the one that write_timeline wrote into")
    named = {int(found[1]): path for path in place.iterdir() if (found := _NAME.fullmatch(path.name))}
    if not named:
        raise TraceError(f"{place} holds no trace-rank*.json; write_timeline makes them")
    traces = tuple(_read(path, rank) for rank, path in sorted(named.items()))
    for trace in traces[1:]:
        for name in ("world_size", "device", "recording"):
            if getattr(trace, name) != getattr(traces[0], name):
                raise TraceError(
                    f"{place} mixes recordings: {name} differs between ranks {traces[0].rank} and {trace.rank}; "
                    "write each recording into a folder of its own"
                )
    missing = sorted(set(traces[0].peers) - named.keys())
    if missing and not partial:
        raise TraceError(
            f"{place} lacks the files of ranks {', '.join(map(str, missing))}, which recorded too; bring them here, or "
            "ask for what is there with partial=True (--partial)"
        )
    return traces


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, separators=(",", ":"), allow_nan=False), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, rank: int) -> RankTrace:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON, or was cut off: {error}; record it again") from None
    data = given.get(KEY) if isinstance(given, dict) else None
    if not isinstance(data, dict):
        raise TraceError(f"{path} is JSON of something else ({KEY!r} is missing); write_timeline writes timelines")
    if data.get("format") != FORMAT:
        raise TraceError(f"{path} has format {data.get('format')!r}; this version reads {FORMAT}")
    try:
        known = {name: data[name] for name in _OF_TIMELINE}
        steps = tuple(StepTimes(**step) for step in data["steps"])
        trace = RankTrace(**known | {"peers": tuple(data["peers"])}, steps=steps, events=tuple(given["traceEvents"]))
    except (KeyError, TypeError) as error:
        raise TraceError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if trace.rank != rank:
        raise TraceError(f"{path} is of rank {trace.rank}; do not rename these files")
    return trace


# ---- events for viewers ----------------------------------------------------------------------------------------------


def chrome_events(timeline: Timeline) -> list[Event]:
    """Build the trace events of a rank: metadata first, then by time."""
    return sorted(_events_of(timeline), key=_place)


def _place(event: Event) -> tuple[bool, float]:
    """Return the sort key of an event: metadata first, then by time."""
    return event["ph"] != "M", event.get("ts", 0.0)


def _events_of(timeline: Timeline) -> Iterator[Event]:
    draw = _Events(timeline)
    yield draw.name("process_name", 0, name=f"rank {timeline.rank} ({timeline.device})")
    yield draw.name("process_sort_index", 0, sort_index=timeline.rank)
    yield draw.name("thread_name", STEPS_THREAD, name="steps")
    for window in timeline.steps:
        yield draw.span(STEPS_THREAD, f"step {window.index}", "step", (window.start_ns, window.end_ns))
    yield draw.name("thread_name", COMPUTE_THREAD, name="compute")
    for span in timeline.spans:
        unit = timeline.units[span.unit]
        name = span.phase if span.phase == OPTIMIZER else f"{span.phase} {unit}"
        event = draw.span(COMPUTE_THREAD, name, span.phase, (span.start_ns, span.end_ns))
        yield event | {"args": {"unit": unit, "step": span.step, "bytes": span.num_bytes}}
    for place, stream in enumerate(STREAMS):
        yield from draw.stream(place, stream)
    for sample in timeline.memory:
        name = f"bytes {timeline.memory_kind}"
        yield draw.event("C", name, sample.time_ns, args={"bytes": sample.num_bytes})


class _Events:
    """A builder of one rank's trace events."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def name(self, what: str, thread: int, **args: Any) -> Event:
        """Build the name of the process or a thread."""
        return {"ph": "M", "name": what, "pid": self._timeline.rank, "tid": thread, "args": args}

    def event(self, kind: str, name: str, time_ns: int, **more: Any) -> Event:
        """Build an event at a time."""
        return {"ph": kind, "name": name, "pid": self._timeline.rank, "ts": _us(time_ns), **more}

    def span(self, thread: int, name: str, kind: str, interval: Interval) -> Event:
        """Build a complete event."""
        return self.event("X", name, interval[0], tid=thread, cat=kind, dur=_us(interval[1] - interval[0]))

    def stream(self, place: int, stream: str) -> Iterator[Event]:
        """Build the events of a stream: each collective, and the flow from it to its wait."""
        known = [(one, one.in_flight) for one in self._timeline.collectives if one.stream == stream and one.in_flight]
        rows = stack_rows([interval for _, interval in known])
        first = _FIRST_LANE_THREAD + _THREADS_PER_LANE * place
        for (one, interval), row in zip(known, rows, strict=True):
            unit = self._timeline.units[one.unit]
            event = self.span(first + row, f"{one.purpose} {unit}", f"collective,{one.purpose}", interval)
            more = {"bytes": one.num_bytes, "axis": one.axis, "number": one.number}
            yield event | {"args": {"unit": unit, "step": one.step, **more}}
            if one.wait_ns is not None and one.blocked is not None:
                flow = {"cat": "flow", "id": self._timeline.rank * _FLOWS_PER_RANK + one.number}
                yield self.event("s", BLOCKED, one.launch_ns, tid=first + row, **flow)
                yield self.event("f", BLOCKED, one.wait_ns, tid=COMPUTE_THREAD, bp="e", **flow)
        for row in range(1 + max(rows, default=-1)):
            yield self.name("thread_name", first + row, name=f"{stream} stream" + (f" ({row + 1})" if row else ""))


def stack_rows(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Assign each interval, by start, to the first row that is free at that time."""
    ends: list[int] = []
    rows = []
    for start, end in intervals:
        row = next((row for row, taken_until in enumerate(ends) if taken_until <= start), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        rows.append(row)
    return rows


def _us(time_ns: int) -> float:
    return time_ns / 1000
