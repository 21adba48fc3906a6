"""The commands of `mfsdp`, and which of them a command line means."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fsdp.cli import checkpoint, describe, doctor, hang, plan, trace, train
from megatron_fsdp.cli.guard import run_guarded
from megatron_fsdp.config.command_parser import Parser
from megatron_fsdp.package_info import __version__


def run_command(words: Sequence[str]) -> int:
    """Run the command that the first of these words names, and return the exit status of the program."""
    if words and words[0] == train.NAME:
        return train.run(words[1:])
    parser = Parser(prog="mfsdp", description="Tools of Megatron-FSDP.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for command in (train, plan, doctor, describe, trace, hang, checkpoint):
        command.add_parser(commands)
    return run_guarded(parser, words)
