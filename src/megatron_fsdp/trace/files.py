"""A folder of timelines: `trace-rank{r}.json` of every rank, trace events for viewers and the exact data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.chrome import chrome_events
from megatron_fsdp.trace.timeline import (
    HOST,
    LANES,
    PHASES,
    STREAM,
    Collective,
    MemorySample,
    Span,
    StepWindow,
    Timeline,
)

KEY = "megatronFsdpTimeline"
"""Where the data stands in the file; viewers pass over it."""

FORMAT = 2
_NAME = re.compile(r"trace-rank(\d+)\.json")
_TABLES: dict[str, type] = {
    "steps": StepWindow,
    "spans": Span,
    "collectives": Collective,
    "memory": MemorySample,
}


def write_timeline(folder: str | os.PathLike[str], timeline: Timeline) -> Path:
    """Write one rank's timeline as `trace-rank{r}.json`; an older one is replaced.

    Args:
        folder: Made if it is not there; the same for all ranks.
        timeline: What was recorded.

    Returns:
        The file. Perfetto opens it.
    """
    path = Path(folder) / f"trace-rank{timeline.rank}.json"
    _write(path, {"traceEvents": chrome_events([timeline]), "displayTimeUnit": "ms", KEY: _to_json(timeline)})
    return path


def write_chrome(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Write the trace events of several ranks into one file, for viewers."""
    _write(Path(path), {"traceEvents": chrome_events(timelines), "displayTimeUnit": "ms"})


def read_timelines(folder: str | os.PathLike[str], *, partial: bool = False) -> tuple[Timeline, ...]:
    """Read what `write_timeline` wrote, by rank.

    Args:
        folder: Where the files of all ranks are.
        partial: Read what is there, where files of some ranks are missing. Who recorded without aligning ranks may be
            alone, so nobody is missed then.

    Raises:
        TraceError: There is nothing, a rank's file is missing, or a file is no timeline, is damaged, or does not belong
            to the others.
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
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, separators=(",", ":"), allow_nan=False), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _to_json(timeline: Timeline) -> dict[str, Any]:
    """Tables as rows of their fields, everything else by name."""
    told = {key: value for key, value in asdict(timeline).items() if key not in _TABLES}
    tables = {
        name: {
            "columns": [field.name for field in fields(row)],
            "rows": [[getattr(item, field.name) for field in fields(row)] for item in getattr(timeline, name)],
        }
        for name, row in _TABLES.items()
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
    hints = get_type_hints(Timeline)
    values: dict[str, Any] = {
        name: _checked(data[name], hint, name)
        for name, hint in hints.items()
        if name not in (*_TABLES, "units", "peers")
    }
    values["units"] = tuple(_checked(label, str, "units") for label in _checked(data["units"], list, "units"))
    values["peers"] = tuple(_checked(rank, int, "peers") for rank in _checked(data["peers"], list, "peers"))
    values |= {name: _rows(data[name], row, name) for name, row in _TABLES.items()}
    timeline = Timeline(**values)
    _check_values(timeline)
    return timeline


def _rows(table: Any, row: type, name: str) -> tuple[Any, ...]:
    hints = get_type_hints(row)
    if _checked(table, dict, name)["columns"] != list(hints):
        raise ValueError(f"the columns of {name} are {table['columns']}, not {list(hints)}")
    found = []
    for values in _checked(table["rows"], list, name):
        cells = zip(_checked(values, list, name), hints.items(), strict=True)
        found.append(row(*(_checked(value, hint, column) for value, (column, hint) in cells)))
    return tuple(found)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """A value that has the type it should have; a truth value is no number."""
    allowed = get_args(hint) or (hint,)
    if type(value) not in allowed:
        wanted = " or ".join("null" if kind is NoneType else kind.__name__ for kind in allowed)
        raise TypeError(f"{name} is {value!r:.60}, not {wanted}")
    return value


def _check_values(timeline: Timeline) -> None:
    """What names something names something that is there."""
    known = {window.index for window in timeline.steps}
    items: list[Span | Collective | MemorySample] = [*timeline.spans, *timeline.collectives, *timeline.memory]
    for item in items:
        if not 0 <= item.unit < len(timeline.units):
            raise ValueError(f"unit {item.unit} of {len(timeline.units)}")
        if item.step not in known:
            raise ValueError(f"step {item.step} is not among the steps")
    for span in timeline.spans:
        if span.phase not in PHASES or span.duration_ns < 0:
            raise ValueError(f"phase {span.phase!r} of {span.duration_ns} ns")
    if timeline.clock not in (HOST, STREAM):
        raise ValueError(f"clock {timeline.clock!r}")
    for one in timeline.collectives:
        if one.lane not in LANES:
            raise ValueError(f"lane {one.lane!r}")
