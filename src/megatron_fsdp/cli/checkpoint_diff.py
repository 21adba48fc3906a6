"""`diff`: whether two checkpoints are the same, and where they differ first."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_fsdp.checkpoint.tools.compare_values import Tolerance
from megatron_fsdp.checkpoint.tools.diff import DiffReport, diff
from megatron_fsdp.checkpoint.tools.locate import open_checkpoint
from megatron_fsdp.cli.arguments import add_filter, add_folder, add_json, add_msc, refuse_msc
from megatron_fsdp.cli.output import write_json, write_line
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME

_SHOWN = 50
_REFERENCE_RTOL, _REFERENCE_ATOL = 1e-5, 1e-8


def add_parser(subparsers: Any) -> None:
    """Add the command and its alias, which has the tolerances of Megatron-LM's inspector."""
    _add(subparsers, "diff", 0.0, 0.0, help="compare two checkpoints")
    _add(subparsers, "compare-two-checkpoint", _REFERENCE_RTOL, _REFERENCE_ATOL)


def _add(subparsers: Any, name: str, rtol: float, atol: float, **kwargs: str) -> None:
    text = (
        "Compare all tensors and objects of two checkpoints by value, however each is cut into chunks; one chunk of "
        "each is in memory at a time. Exit status: 0 they are the same, 1 they differ, 2 one cannot be read."
    )
    parser = subparsers.add_parser(name, description=text, **kwargs)
    add_folder(parser, "checkpoint_1", "A")
    add_folder(parser, "checkpoint_2", "B")
    what = "elements are equal where |a - b| <= atol + rtol * |b|"
    parser.add_argument("--rtol", type=float, default=rtol, help=f"{what} (default %(default)s)")
    parser.add_argument("--atol", type=float, default=atol, help="see --rtol (default %(default)s)")
    parser.add_argument("--bitwise", action="store_true", help="equal bits: 0.0 and -0.0 differ, and so do unlike NaN")
    parser.add_argument("--all", action="store_true", help=f"list all differences, not only the first {_SHOWN}")
    add_filter(parser)
    add_json(parser)
    add_msc(parser)


def run(args: argparse.Namespace) -> int:
    """Compare.

    Raises:
        CheckpointError: One cannot be read.
        ConfigurationError: The options contradict each other.
    """
    refuse_msc(args)
    given = (args.rtol, args.atol)
    rtol, atol = (0.0, 0.0) if args.bitwise and given == (_REFERENCE_RTOL, _REFERENCE_ATOL) else given
    tolerance = Tolerance(rtol, atol, args.bitwise)
    found = diff(open_checkpoint(args.checkpoint_1), open_checkpoint(args.checkpoint_2), tolerance, args.filter)
    if args.json:
        write_json(found.to_json())
    else:
        _write(found, len(found.differences) if args.all else _SHOWN)
    return EXIT_SAME if found.is_same else EXIT_DIFFERENT


def _write(found: DiffReport, shown: int) -> None:
    if found.is_same:
        write_line(f"the same: {found.compared} keys")
        return
    for item in found.differences[:shown]:
        write_line(f"{item.key}: {item.told}")
    more = len(found.differences) - shown
    if more > 0:
        write_line(f"... and {more} more (--all lists them)")
    write_line(f"{len(found.differences)} keys differ; {found.compared} were compared")
