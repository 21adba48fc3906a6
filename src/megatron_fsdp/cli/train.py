"""`train`: the trainer. Its command line is its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_fsdp.train import main

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
    return main(argv)
