"""`mfsdp trace`: recordings of all ranks as a table, JSON or one file for a viewer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fsdp.cli.output import in_bytes, write_facts, write_json, write_line, write_table
from megatron_fsdp.config.command_parser import EXIT_SAME

if TYPE_CHECKING:
    from megatron_fsdp.trace import Comparison, Timeline
    from megatron_fsdp.trace.summary import Row, Times

_TIMES = ("compute", "gather", "wait", "copy", "reduce", "update", "other")
_UNIT_COLUMNS = ("unit", *_TIMES, "exposed", "sent", "memory", "skew")
_RANK_COLUMNS = ("rank", "step", "own", *_TIMES, "exposed", "hidden", "sent", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.description = (
        "Read the timelines of all ranks and tell where the time went, how much of communication was hidden, and which "
        "unit and rank are slowest. Times are milliseconds, in the mean of the steps looked at. Exit status: 0, or 2 "
        "where it could not be done."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where write_timeline wrote trace-rank*.json")
    parser.add_argument("--step", type=int, metavar="K", help="look at one step; else at all that every rank recorded")
    parser.add_argument("--json", action="store_true", help="print JSON, with times in nanoseconds")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="write one JSON of all ranks for Perfetto")
    parser.add_argument("--partial", action="store_true", help="go on where files of some ranks are missing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read timelines, compare them, and write the requested output, and return the exit status."""
    from megatron_fsdp.trace.files import read_timelines, write_chrome
    from megatron_fsdp.trace.summary import compare

    timelines = read_timelines(args.folder, partial=args.partial)
    found = compare(timelines, args.step)
    if args.merge is not None:
        write_chrome(args.merge, timelines)
    if args.json:
        write_json(_as_json(found, timelines))
    else:
        _write(found, timelines)
    return EXIT_SAME


def _write(found: Comparison, timelines: Sequence[Timeline]) -> None:
    write_facts(_facts(found, timelines))
    write_line()
    rows = []
    for rank in found.ranks:
        times = [_ms(rank.duration_ns), _ms(rank.own_ns), *_columns(rank.times), _ms(rank.exposed_ns)]
        rows.append([str(rank.rank), *times, _part(rank.hidden), in_bytes(rank.sent_bytes), _memory(rank)])
    write_table(_RANK_COLUMNS, rows, right=_RANK_COLUMNS)
    write_line()
    rows = []
    for unit, skew_ns in zip(found.units, found.unit_skews_ns, strict=True):
        times = [*_columns(unit.times), _ms(unit.exposed_ns)]
        label = timelines[0].units[unit.unit or 0]
        rows.append([label, *times, in_bytes(unit.sent_bytes), _memory(unit), _ms(skew_ns)])
    write_table(_UNIT_COLUMNS, rows, right=_UNIT_COLUMNS[1:])


def _as_json(found: Comparison, timelines: Sequence[Timeline]) -> dict[str, Any]:
    told = asdict(found)
    for row, value in zip((*found.ranks, *found.units), (*told["ranks"], *told["units"]), strict=True):
        value |= {"own_ns": row.own_ns, "sent_bytes": row.sent_bytes, "hidden": row.hidden}
    for value, skew_ns in zip(told["units"], told.pop("unit_skews_ns"), strict=True):
        value |= {"unit": timelines[0].units[value["unit"]], "skew_ns": skew_ns}
    return told


def _facts(found: Comparison, timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    steps = f"{found.steps[0]} to {found.steps[-1]}" if len(found.steps) > 1 else str(found.steps[0])
    facts = [
        ("communication hidden", _part(found.hidden)),
        ("steps", steps),
        ("ranks", f"{len(timelines)} of {found.world_size}, {timelines[0].device}"),
        ("slowest rank", f"{found.slowest_rank}, {_ms(found.skew_ns)} ms more work than the fastest"),
        ("slowest unit", found.slowest_unit or "none"),
        ("clocks", "ranks left a barrier together" if found.is_aligned else "wall clocks of the hosts"),
    ]
    if found.is_cut:
        facts.append(("incomplete", "a step had more phases than there was room for"))
    return facts


def _columns(times: Times) -> list[str]:
    return [_ms(getattr(times, name)) for name in _TIMES]


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.2f}"


def _part(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def _memory(row: Row) -> str:
    return "-" if row.memory_bytes is None else in_bytes(row.memory_bytes)
