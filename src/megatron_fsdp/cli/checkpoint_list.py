"""`list`: the checkpoints of a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from megatron_fsdp.checkpoint.tools.locate import list_checkpoints
from megatron_fsdp.cli.arguments import add_json
from megatron_fsdp.cli.output import in_bytes, write_json, write_table
from megatron_fsdp.config.command_parser import EXIT_SAME


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    text = "List the checkpoints of a run: iterations, sizes, which is the latest, which are unfinished."
    parser = subparsers.add_parser("list", help="the checkpoints of a run", description=text)
    parser.add_argument("root", metavar="ROOT", help="folder of a run, with iter_* folders in it")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List.

    Raises:
        CheckpointError: It is not the folder of a run.
    """
    found = list_checkpoints(args.root)
    if args.json:
        write_json([asdict(item) for item in found])
        return EXIT_SAME
    rows = [[item.name, in_bytes(item.nbytes), _state(item.is_latest, item.is_whole)] for item in found]
    write_table(["checkpoint", "bytes", ""], rows, right=["bytes"])
    return EXIT_SAME


def _state(is_latest: bool, is_whole: bool) -> str:
    if not is_whole:
        return "unfinished"
    return "latest" if is_latest else ""
