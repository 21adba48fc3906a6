"""`train`: the trainer. Its command line is its own."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

NAME = "train"


def add_parser(subparsers: Any) -> None:
    """Add the command to the list of `mfsdp --help`.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    subparsers.add_parser(NAME, help="train a language model, sharded over ranks; flags as in Megatron-LM")


def run(argv: Sequence[str]) -> int:
    """Train, with the words after `mfsdp train`.

    Returns:
        The exit status.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among the imports ends it without a traceback
    try:
        from megatron_fsdp.train.program import main  # torch's elastic launcher, which other commands do not need

        return main(argv)
    finally:
        signal.signal(signal.SIGINT, before)
