"""`mfsdp hang`: diagnose a run that stands still."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_fsdp.cli.output import add_json, write_json, write_line
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Read the logs that the ranks of a run keep (MFSDP_HANG_LOG, or model.log_for_hangs) and name the odd rank. "
        "The run may be under way, hang, or be over; any machine that sees the folder will do. Exit status: 0 nothing "
        "is odd, 1 something is, 2 the logs cannot be read."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder of the logs")
    parser.add_argument(
        "--after",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="how long nothing may happen on a rank that waits before it is called a hang (%(default)g)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Diagnose a run, and return the exit status."""
    from megatron_fsdp.config.engine_options import checked_timeout
    from megatron_fsdp.hang.explain import explain
    from megatron_fsdp.hang.log_file import read_folder

    checked_timeout(args.after, "--after")
    found = explain(read_folder(args.folder), args.after)
    if args.json:
        findings = [{**vars(each), "kind": each.kind.name.lower()} for each in found.findings]
        rows = [vars(row) for row in found.rows]
        write_json({"odd": found.is_odd, "findings": findings, "ranks": rows, "remarks": found.remarks})
    else:
        write_line(str(found))
    return EXIT_DIFFERENT if found.is_odd else EXIT_SAME
