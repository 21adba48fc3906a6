"""A complete small trainer over the library: `python -m megatron_fsdp.train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_fsdp.errors import MissingPackageError
from megatron_fsdp.optional_packages import require_installed

_EXIT_USAGE = 2


def main(argv: Sequence[str]) -> int:
    """Check that the trainer's packages are installed, then run `program.main`; return its exit code."""
    try:
        require_installed("tokenizers", "the trainer")
    except MissingPackageError as error:
        sys.stderr.write(f"error: {error}\n")
        return _EXIT_USAGE
    from megatron_fsdp.train import program  # torch, which is slow to import

    return program.main(argv)
