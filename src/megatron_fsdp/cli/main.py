"""The `mfsdp` command as a program."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_fsdp.interruption import end_quietly


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments after the program's name; None: those of this process, whose program this is then.

    Returns:
        The exit status: 0 well; 1 well, and the answer is no (they differ, there are problems); 2 it went wrong.
    """
    if argv is None:
        end_quietly()
    from megatron_fsdp.cli.commands import run_command  # torch, which is slow to import

    return run_command(sys.argv[1:] if argv is None else argv)
