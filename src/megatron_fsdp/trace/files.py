"""A folder of timelines: `trace-rank{r}.json` of every rank, trace events for viewers and the exact data.

Perfetto and chrome://tracing show the events ("Trace Event Format", Google, 2016): "X" (complete), "C" (counter), "s"
and "f" (flow) and "M" (metadata), with times in microseconds. A rank is a process. Its threads are the steps, the
compute side, and the lanes; complete events of one thread have to nest, so a lane has as many threads as it had
collectives in flight at a time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.timeline import BLOCKED, LANES, OPTIMIZER, TABLES, Collective, MemorySample, Span, Timeline

STEPS_THREAD, COMPUTE_THREAD = 0, 1
_FIRST_LANE_THREAD = 100
_THREADS_PER_LANE = 1000
_FLOWS_PER_RANK = 1_000_000_000

Event = dict[str, Any]

KEY = "megatronFsdpTimeline"
"""The key of the data in the file; viewers ignore it."""

FORMAT = 3
_NAME = re.compile(r"trace-rank(\d+)\.json")


def write_timeline(folder: str | os.PathLike[str], timeline: Timeline) -> Path:
    """Write one rank's timeline as `trace-rank{r}.json`, which Perfetto opens, and return the path of the file.

    The folder, the same for all ranks, is made if it is not there; an older file is replaced.
    """
    path = Path(folder) / f"trace-rank{timeline.rank}.json"
    _write(path, {"traceEvents": chrome_events([timeline]), "displayTimeUnit": "ms", KEY: _to_json(timeline)})
    return path


def write_chrome(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Write the trace events of several ranks into one file, for viewers."""
    _write(Path(path), {"traceEvents": chrome_events(timelines), "displayTimeUnit": "ms"})


def read_timelines(folder: str | os.PathLike[str], *, partial: bool = False) -> tuple[Timeline, ...]:
    """Read the timelines that `write_timeline` wrote into a folder, by rank.

    A file that is missing, damaged or of another recording is a `TraceError`. `partial` reads what is there; recordings
    whose ranks were not aligned may be of some ranks only, so no file is missed then.
    """
    place = Path(folder)
    if not place.is_dir():
        raise TraceError(f"{place} is not a folder; give the one that write_timeline wrote into")
    named = {int(found[1]): path for path in place.iterdir() if (found := _NAME.fullmatch(path.name))}
    if not named:
        raise TraceError(f"{place} holds no trace-rank*.json; write_timeline makes them")
    timelines = tuple(_read(path, rank) for rank, path in sorted(named.items()))
    for timeline in timelines[1:]:
        for name in ("world_size", "units", "device", "clock", "recording"):
            if getattr(timeline, name) != getattr(timelines[0], name):
                raise TraceError(
                    f"{place} mixes recordings: {name} differs between ranks {timelines[0].rank} and {timeline.rank}; "
                    "write each recording into a folder of its own"
                )
    missing = sorted(set(timelines[0].peers) - named.keys())
    if missing and not partial:
        raise TraceError(
            f"{place} lacks the files of ranks {', '.join(map(str, missing))}, which recorded too; bring them here, or "
            "ask for what is there with partial=True (--partial)"
        )
    return timelines


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, separators=(",", ":"), allow_nan=False), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _to_json(timeline: Timeline) -> dict[str, Any]:
    """Return tables as rows of their fields, everything else by name."""
    told = {key: value for key, value in asdict(timeline).items() if key not in TABLES}
    tables = {
        name: {
            "columns": [field.name for field in fields(row)],
            "rows": [[getattr(item, field.name) for field in fields(row)] for item in getattr(timeline, name)],
        }
        for name, row in TABLES.items()
    }
    return {"format": FORMAT, **told, **tables}


def _read(path: Path, rank: int) -> Timeline:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON, or was cut off: {error}; record it again") from None
    data = told.get(KEY) if isinstance(told, dict) else None
    if not isinstance(data, dict):
        raise TraceError(f"{path} is JSON of something else ({KEY!r} is missing); write_timeline writes timelines")
    if data.get("format") != FORMAT:
        raise TraceError(f"{path} has format {data.get('format')!r}; this version reads {FORMAT}")
    try:
        timeline = _from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if timeline.rank != rank:
        raise TraceError(f"{path} is of rank {timeline.rank}; do not rename these files")
    return timeline


def _from_json(data: dict[str, Any]) -> Timeline:
    values = {field.name: data[field.name] for field in fields(Timeline)}
    for name, row in TABLES.items():
        columns = [field.name for field in fields(row)]
        if data[name]["columns"] != columns:
            raise ValueError(f"the columns of {name} are {data[name]['columns']}, not {columns}")
        values[name] = tuple(row(**dict(zip(columns, cells, strict=True))) for cells in data[name]["rows"])
    timeline = Timeline(**values | {"units": tuple(data["units"]), "peers": tuple(data["peers"])})
    known = {window.index for window in timeline.steps}
    items: list[Span | Collective | MemorySample] = [*timeline.spans, *timeline.collectives, *timeline.memory]
    for item in items:
        if not 0 <= item.unit < len(timeline.units) or item.step not in known:
            raise ValueError(f"step {item.step} or unit {item.unit} is not there")
    return timeline


# ---- events for viewers ----------------------------------------------------------------------------------------------


def chrome_events(timelines: Iterable[Timeline]) -> list[Event]:
    """Make the trace events of some ranks: metadata first, then by time.

    Ranks that were aligned share a clock; others are shifted by when their recordings started on their wall clocks.
    """
    ranks = tuple(timelines)
    first_ns = min((timeline.started_unix_ns for timeline in ranks), default=0)
    are_aligned = all(timeline.is_aligned for timeline in ranks)
    events: list[Event] = []
    for timeline in ranks:
        shift_us = 0.0 if are_aligned else _us(timeline.started_unix_ns - first_ns)
        events += [event | {"ts": event["ts"] + shift_us} if "ts" in event else event for event in _events_of(timeline)]
    return sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0)))


def _events_of(timeline: Timeline) -> Iterator[Event]:
    yield from _process(timeline)
    yield _thread(timeline, STEPS_THREAD, "steps")
    for window in timeline.steps:
        name, duration_ns = f"step {window.index}", window.end_ns - window.start_ns
        yield _complete(timeline, STEPS_THREAD, name, "step", window.start_ns, duration_ns)
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
    known = [(one, interval) for one in collectives if (interval := one.in_flight) is not None]
    rows = stack_rows([interval for _, interval in known])
    first = _FIRST_LANE_THREAD + _THREADS_PER_LANE * place
    for (one, (start_ns, end_ns)), row in zip(known, rows, strict=True):
        thread = first + row
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
    for row in range(1 + max(rows, default=-1)):
        yield _thread(timeline, first + row, f"{LANES[place]} lane" + (f" ({row + 1})" if row else ""))


def _arrow(timeline: Timeline, one: Collective, thread: int) -> Iterator[Event]:
    """Yield the flow from a collective to the wait for it."""
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
    """Return for each interval, by start, the first row where nothing else lies at that time."""
    ends: list[int] = []
    rows = []
    for start, end in intervals:
        row = next((row for row, taken_until in enumerate(ends) if taken_until <= start), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        rows.append(row)
    return rows


def _process(timeline: Timeline) -> Iterator[Event]:
    common = {"ph": "M", "pid": timeline.rank, "tid": 0}
    yield {**common, "name": "process_name", "args": {"name": f"rank {timeline.rank} ({timeline.device})"}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": timeline.rank}}


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
