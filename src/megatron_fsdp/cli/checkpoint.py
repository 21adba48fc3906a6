"""`mfsdp checkpoint ...`; the same commands under the names of Megatron-LM's inspector are hidden aliases."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from megatron_fsdp.cli import (
    checkpoint_convert,
    checkpoint_diff,
    checkpoint_edit,
    checkpoint_inspect,
    checkpoint_list,
    checkpoint_map,
    checkpoint_show,
    checkpoint_torch,
    checkpoint_verify,
)
from megatron_fsdp.cli.guard import run_guarded
from megatron_fsdp.config.command_parser import Parser
from megatron_fsdp.package_info import __version__

_DESCRIPTION = "Look into checkpoints, compare, edit and convert them. One process on the CPU is enough for all of it."

_MODULES: tuple[ModuleType, ...] = (
    checkpoint_inspect,
    checkpoint_list,
    checkpoint_show,
    checkpoint_diff,
    checkpoint_verify,
    checkpoint_edit,
    checkpoint_torch,
    checkpoint_map,
    checkpoint_convert,
)
"""Each has `add_parser(subparsers)` and, unless its parsers set `run` themselves, `run(args) -> int`."""

_ON_ALL_RANKS: tuple[ModuleType, ...] = (checkpoint_convert,)
"""Of them, those whose work is shared out over the ranks of torchrun; the others work on the first rank alone."""


def add_parser(commands: Any) -> None:
    """Add `checkpoint` and all below it to the sub-commands of a parser."""
    parser = commands.add_parser("checkpoint", help="inspect, compare, edit and convert", description=_DESCRIPTION)
    add_commands(parser)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands for checkpoints to a parser."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for module in _MODULES:
        before = set(commands.choices)
        module.add_parser(commands)
        for name in set(commands.choices) - before:
            command = commands.choices[name]
            run = command.get_default("run") or module.run
            if module not in _ON_ALL_RANKS and not isinstance(run, functools.partial):
                run = functools.partial(_on_first_rank, run)
            command.set_defaults(run=run)


def _on_first_rank(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Under torchrun, let one rank do it and the others end well."""
    return run(args) if os.environ.get("RANK", "0") == "0" else 0


def inspector(argv: Sequence[str] | None = None) -> int:
    """The commands of `mfsdp checkpoint` as a program of its own, `tools/checkpoint/checkpoint_inspector.py`."""
    parser = Parser(prog="checkpoint_inspector.py", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_commands(parser)
    return run_guarded(parser, sys.argv[1:] if argv is None else argv)
