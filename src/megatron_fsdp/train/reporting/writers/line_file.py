"""A text file that grows by whole lines, and survives a full disk, a kill while writing, and a restart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path


class LineFile:
    """Lines at the end of a file. What could not be written waits for the next try, so that no line is lost or torn."""

    def __init__(self, path: Path) -> None:
        """A file, which need not be there."""
        self._path = path
        self._waiting: list[str] = []

    @property
    def has_waiting(self) -> bool:
        """Whether something could not be written yet."""
        return bool(self._waiting)

    def keep(self, is_kept: Callable[[str], bool]) -> bool:
        """Keep those of the lines that are whole and wanted; the file is replaced at once or not at all.

        Args:
            is_kept: Of a line, with its end.

        Returns:
            Whether any lines are left.

        Raises:
            OSError: The file cannot be read or replaced; it is as it was.
        """
        if not self._path.exists():
            return False
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and is_kept(line)]
        if kept != lines:
            whole = self._path.with_name(f"{self._path.name}.new")
            whole.write_text("".join(kept), encoding="utf-8")
            whole.replace(self._path)
        return bool(kept)

    def append(self, lines: Iterable[str]) -> None:
        """Add lines and close the file, so that a run that is cut short keeps what it had.

        Args:
            lines: Each with its end.

        Raises:
            OSError: They cannot be written now; the file is as it was, and they are tried again the next time.
        """
        self._waiting.extend(lines)
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            text = "".join(self._waiting).encode()
            try:
                written = file.write(text)
                if written != len(text):  # the disk is full: the system writes what fits in
                    file.write(text[written:])
            except OSError:
                _cut(file.fileno(), size)
                raise
        self._waiting.clear()


def _cut(descriptor: int, size: int) -> None:
    """Take a torn line off again, where the system lets us."""
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        return
