"""`mfsdp trace`: the share of hidden communication in each step, and one file of all ranks for a viewer."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron_fsdp.cli.output import write_facts, write_json, write_line, write_table
from megatron_fsdp.config.command_parser import EXIT_SAME

_COLUMNS = ("rank", "step", "time (ms)", "communication (ms)", "exposed (ms)", "hidden")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Read the traces of all ranks and tell how much of communication was hidden behind other work in each step. "
        "Times are milliseconds. Exit status: 0, or 2 where it could not be done."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where write_timeline wrote trace-rank*.json")
    parser.add_argument("--json", action="store_true", help="print JSON, with times in nanoseconds")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="write one JSON of all ranks for Perfetto")
    parser.add_argument("--partial", action="store_true", help="go on where files of some ranks are missing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read traces, write the requested output, and return the exit status."""
    from megatron_fsdp.trace.files import merge_traces, read_traces
    from megatron_fsdp.trace.summary import hidden_part

    traces = read_traces(args.folder, partial=args.partial)
    steps, is_cut = [step for trace in traces for step in trace.steps], any(trace.is_cut for trace in traces)
    if args.merge is not None:
        merge_traces(args.merge, traces)
    if args.json:
        rows = [{**asdict(step), "hidden": step.hidden} for step in steps]
        write_json({"hidden": hidden_part(steps), "is_cut": is_cut, "steps": rows})
        return EXIT_SAME
    facts = [
        ("communication hidden", _percent(hidden_part(steps))),
        ("ranks", f"{len(traces)} of {traces[0].world_size}, {traces[0].device}"),
    ]
    write_facts([*facts, *([("incomplete", "a step had more phases than there was room for")] if is_cut else [])])
    write_line()
    rows_of_text = [
        [str(step.rank), str(step.step)]
        + [f"{time_ns / 1e6:.2f}" for time_ns in (step.duration_ns, step.communication_ns, step.exposed_ns)]
        + [_percent(step.hidden)]
        for step in steps
    ]
    write_table(_COLUMNS, rows_of_text, right=_COLUMNS)
    return EXIT_SAME


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"
