"""Ctrl-C in a program of this package: no traceback, and the exit status that shells use for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT


def end_quietly() -> None:
    """Make Ctrl-C end this process at once with 130; for a program's first line, before slow imports.

    Where Ctrl-C is ignored, as in background jobs, or has another handler, that stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def raising() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on Ctrl-C inside the block, so that the block can clean up."""
    is_quiet = signal.getsignal(signal.SIGINT) is _end
    if is_quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_quiet:
            signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    # Not the signal's own default: a shell would say 130, but the parent process would see the signal.
    os._exit(EXIT_INTERRUPTED)
