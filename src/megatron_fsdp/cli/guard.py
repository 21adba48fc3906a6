"""The outermost error handler: an error becomes one line and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_fsdp.cli.output import write_error
from megatron_fsdp.config.command_parser import EXIT_ERROR, EXIT_INTERRUPTED, Parser, raising
from megatron_fsdp.errors import MegatronFSDPError


def run_guarded(parser: Parser, argv: Sequence[str]) -> int:
    """Parse, run the command, and return its exit status; 2 where it failed."""
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
