"""`edit`: a copy with keys removed or renamed and tensors cast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_fsdp.checkpoint.tools.edit import edit
from megatron_fsdp.checkpoint.tools.edit_plan import parse_operation
from megatron_fsdp.checkpoint.tools.locate import open_checkpoint
from megatron_fsdp.cli.arguments import add_folder, add_msc, refuse_msc
from megatron_fsdp.cli.output import write_line
from megatron_fsdp.config.command_parser import EXIT_SAME


def add_parser(subparsers: Any) -> None:
    """Add the command and its alias."""
    text = (
        "Write a copy of a checkpoint with keys removed or renamed and tensors in another dtype. Operations are "
        "applied in the order they are given, to all keys that contain a match of their regular expression; one that "
        "matches nothing is an error, and so are two keys that become the same. One chunk is in memory at a time."
    )
    for name, help_text in (("edit", {"help": "a copy with other keys or dtypes"}), ("modify-state-dict", {})):
        parser = subparsers.add_parser(name, description=text, **help_text)
        add_folder(parser, "input_dir", "SRC")
        parser.add_argument("output_dir", metavar="DST", type=Path, help="the copy; must not exist, or be empty")
        parser.add_argument(
            "--op",
            metavar="OP",
            action="append",
            default=[],
            help='"remove REGEX", "rename REGEX REPLACEMENT" or "cast REGEX DTYPE"; may be given several times; quote '
            "a part that is empty or holds spaces",
        )
        add_msc(parser)


def run(args: argparse.Namespace) -> int:
    """Edit.

    Raises:
        CheckpointError: The source cannot be read or the target not be written.
        ConfigurationError: The operations are wrong.
    """
    refuse_msc(args)
    operations = [parse_operation(text) for text in args.op]
    found = edit(open_checkpoint(args.input_dir), args.output_dir, operations)
    write_line(
        f"{args.output_dir}: {len(found.kept)} keys ({len(found.removed)} removed, {found.renamed} renamed, "
        f"{found.cast} cast)"
    )
    if found.copied_files:
        write_line(f"copied as they are: {', '.join(found.copied_files)}")
    if found.dropped_files:
        write_line(f"not copied: {', '.join(found.dropped_files)}")
    return EXIT_SAME
