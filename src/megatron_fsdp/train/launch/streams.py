"""Standard streams that may be closed, on a full disk, or without a reader: nothing of that ends a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


def tell(text: str) -> None:
    """Write lines to standard error; on a terminal on a line of their own, with the cursor shown."""
    if sys.stderr is None:  # closed when the program started
        return
    # On a terminal the picture of a run that was ended leaves the cursor at the end of a line.
    try:
        new_line = "\r\n\x1b[?25h" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{new_line}{text.rstrip()}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        point_nowhere(sys.stderr)


def let_go() -> None:
    """Drop what was printed and cannot be written, for which Python would end with a status of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            point_nowhere(stream)


def point_nowhere(file: IO[str]) -> None:
    """Let a file of this process, with what is buffered for it, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):  # a file of no descriptor
        os.dup2(nowhere, file.fileno())
    os.close(nowhere)
