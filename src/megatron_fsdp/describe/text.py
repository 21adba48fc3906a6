"""Text for people: sizes, tables, and lines that fit the terminal. Pure, but for the terminal's width."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import zip_longest

WIDTH = 100  # columns of lines in files and pipes


def is_terminal() -> bool:
    """Return True if standard output is a terminal."""
    with suppress(AttributeError, ValueError):  # there is no standard output, or it is closed
        return sys.stdout.isatty()
    return False


def width() -> int:
    """Return the number of columns for lines: the terminal's, or elsewhere 100 at most."""
    return min(shutil.get_terminal_size((WIDTH, 0)).columns, 10**4 if is_terminal() else WIDTH)


def in_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = (), width: int = sys.maxsize
) -> list[str]:
    """Align a table, titles first; the columns of the titles `right` are aligned to the right.

    Where it is wider than `width`, titles take a line for each word, and columns stand closer.
    """
    titles = [list(columns)]
    for gap in ("  ", " "):
        widths = [max(map(len, column)) for column in zip(*titles, *rows, strict=True)]
        if sum(widths) + len(gap) * (len(widths) - 1) <= width:
            break
        titles = [list(line) for line in zip_longest(*map(str.split, columns), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*titles, *rows, strict=True)]
    lines = []
    for row in (*titles, *rows):
        cells = zip(columns, row, widths, strict=True)
        padded = (cell.rjust(size) if title in right else cell.ljust(size) for title, cell, size in cells)
        lines.append(gap.join(padded).rstrip())
    return lines


def folded(text: str, width: int, indent: int = 2, end: str = "") -> str:
    """Break lines that are wider than `width` between words, with a hanging indent; `end` stands at each break."""

    def fold(line: str) -> str:
        hanging = " " * (len(line) - len(line.lstrip()) + indent)
        wrapped = textwrap.wrap(
            line, width - len(end), subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
        )
        return f"{end}\n".join(wrapped)

    return "\n".join(fold(line) if len(line) > width else line for line in text.split("\n"))
