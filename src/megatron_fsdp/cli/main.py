"""The `mfsdp` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_fsdp.cli import checkpoint, describe, doctor, hang, plan, trace, train
from megatron_fsdp.cli.guard import run_guarded
from megatron_fsdp.command_parser import Parser
from megatron_fsdp.package_info import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments after the program's name; None: those of this process.

    Returns:
        The exit status: 0 well; 1 well, and the answer is no (they differ, there are problems); 2 it went wrong.
    """
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] == train.NAME:
        return train.run(words[1:])
    parser = Parser(prog="mfsdp", description="Tools of Megatron-FSDP.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for command in (train, plan, doctor, describe, trace, hang, checkpoint):
        command.add_parser(commands)
    return run_guarded(parser, words)
