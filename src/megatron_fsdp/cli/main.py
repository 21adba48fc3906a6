"""The `mfsdp` command, which imports only the subcommand that runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron_fsdp.cli.output import write_error
from megatron_fsdp.config.command_parser import EXIT_ERROR, EXIT_INTERRUPTED, Parser, end_quietly, raising
from megatron_fsdp.errors import MegatronFSDPError
from megatron_fsdp.package_info import __version__

_COMMANDS = {
    "train": "train a language model, sharded over ranks; flags as in Megatron-LM",
    "plan": "memory, traffic and time of a run, without hardware",
    "doctor": "train a model sharded on local ranks and in one process, and name what differs",
    "replay": "execute a recorded step of a deterministic run again on one rank, and compare the bits",
    "describe": "units, layouts, dtypes, groups and options of a model on a rank, without hardware",
    "trace": "look into recorded timelines",
    "hang": "name the rank that the others wait for, its unit and what it does",
    "checkpoint": "inspect, compare and convert",
    "docs": "print a page of the documentation",
}
"""Each is a module here with `add_arguments(parser)`, but for the trainer, which has a command line of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; without `arguments`, that of this process.

    0 is success, 1 success with a negative answer (differences, problems), 2 failure.
    """
    if argv is None:
        end_quietly()
    words = list(sys.argv[1:] if argv is None else argv)
    asked = words[0] if words else ""
    if asked == "train":
        from megatron_fsdp.train import main as train

        return train(words[1:])
    parser = Parser(prog="mfsdp", description="Tools of Megatron-FSDP.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, help_text in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text)
        if name == asked:
            import_module(f"megatron_fsdp.cli.{name}").add_arguments(command)  # most import torch, which is slow
    return run_guarded(parser, words)


def run_guarded(parser: Parser, argv: Sequence[str]) -> int:
    """Parse arguments, run the command, and return its exit status; an error becomes one line and status 2."""
    args = parser.parse_args(argv)
    try:
        with raising():
            status: int = args.run(args)
            sys.stdout.flush()
    except MegatronFSDPError as error:
        write_error(str(error))
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        write_error("there is not enough memory for this; free some, or use another machine")
        return EXIT_ERROR
    except RecursionError:
        write_error("what it holds nests too deep for this")
        return EXIT_ERROR
    except OSError as error:
        write_error(f"{type(error).__name__}: {error}")
        return EXIT_ERROR
    return status
