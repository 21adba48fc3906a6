"""What reading a file may cost: memory and time in proportion to its size, whatever the file says.

Files of others can be small and stand for much: a pickle that copies one list a thousand times, lists that hold each
other, keys whose hashes are equal, a shape of 60,000 dimensions, a link to a device. Readers count what they make
beyond the bytes themselves with a `ReadingBudget`, and open files with `open_file`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import CheckpointError

SPARE_BYTES = 8 << 20
BYTES_PER_BYTE = 64
"""A file of n bytes may make SPARE_BYTES + n * BYTES_PER_BYTE bytes besides the objects that it names one by one."""
ELEMENT_BYTES = 32
"""What an element of a list or dict counts."""

SPARE_SECONDS = 5.0
SECONDS_PER_BYTE = 10e-6
"""The same for the time of the processor; honest files take up to 0.6 us for a byte."""

MAX_DEPTH = 100
"""How deep containers, and the names in a key, may nest."""
MAX_DIMS = 64
"""What torch allows a tensor."""
MAX_JSON_BYTES = 1 << 30

BETWEEN_LOOKS = 1 << 16
"""What is spent between two looks at the clock."""


class OverBudgetError(Exception):
    """A file asks for more memory or time than files of its size need."""


class ReadingBudget:
    """Counts what reading one file makes, and its time.

    Args:
        nbytes: How many bytes are read.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = SPARE_BYTES + BYTES_PER_BYTE * nbytes
        self._until_look = BETWEEN_LOOKS
        self._seconds = SPARE_SECONDS + SECONDS_PER_BYTE * nbytes
        self._begun: float | None = None  # at the first look, which small files do not come to

    def spend(self, nbytes: int) -> None:
        """Count something that is about to be made, copied, hashed or written out.

        Raises:
            OverBudgetError: That is more than a file of this size needs, or it has taken too long.
        """
        self._left -= nbytes
        if self._left < 0:
            raise OverBudgetError(
                "reading it would take far more memory than its size calls for, as where parts are copied, or contain "
                "each other, again and again; no checkpoint needs that"
            )
        self._until_look -= nbytes
        if self._until_look < 0:
            self._until_look = BETWEEN_LOOKS
            now = time.thread_time()
            self._begun = now if self._begun is None else self._begun
            if now - self._begun > self._seconds:
                raise OverBudgetError("reading it takes far longer than its size calls for; no checkpoint needs that")


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: It is something else, or cannot be opened.
    """
    return open(path, "rb", opener=only_regular)  # Path.open takes no opener


def only_regular(path: str, flags: int) -> int:
    """Open no pipe or socket, which would be waited for, and no device, which may never end; an `opener` of `open`."""
    _require_regular(path, Path(path).stat())
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _require_regular(path, os.fstat(descriptor))  # it may be another one by now
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a folder, pipe, socket or device where a file should be", path)


def read_file(path: Path, at_most: int) -> bytes:
    """The contents of a regular file.

    Raises:
        OSError: It is larger than `at_most` bytes, no regular file, or cannot be read.
    """
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > at_most:
            raise OSError(errno.EFBIG, f"it has {nbytes} bytes, and {at_most} is the most that is read", str(path))
        return file.read(nbytes)


def read_json(path: Path, at_most: int = MAX_JSON_BYTES) -> Any:
    """What a JSON file holds.

    Raises:
        CheckpointError: It is too large, no regular file, no JSON, or cannot be read.
    """
    try:
        return json.loads(read_file(path, at_most).decode("utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as JSON ({shortened(str(told))}); it is damaged, restore it from a copy"
        ) from error


def shortened(text: str, most: int = 256) -> str:
    """Text from a file, no longer than a message should be."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
