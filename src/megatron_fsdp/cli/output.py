"""What people read: tables with `rich` on a terminal where it is installed, plain aligned text everywhere else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron_fsdp.describe.description import in_bytes as in_bytes

Rows = Sequence[Sequence[str]]


def write_line(text: str = "") -> None:
    """Write one line of text."""
    sys.stdout.write(f"{printable(text)}\n")


def write_json(value: Any) -> None:
    """Write JSON, indented."""
    sys.stdout.write(f"{json.dumps(value, indent=2, allow_nan=False)}\n")


def write_error(text: str) -> None:
    """Write a line to the error stream."""
    sys.stderr.write(f"error: {printable(text)}\n")


def write_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Write names and values, aligned."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        write_line(f"{name:<{width}}  {value}")


def write_table(columns: Sequence[str], rows: Rows, *, right: Sequence[str] = ()) -> None:
    """Write a table.

    Args:
        columns: Their titles.
        rows: Cells of each row.
        right: Titles of the columns that stand at the right.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _write_rich(columns, cells, right):
        return
    widths = [max(len(row[place]) for row in [columns, *cells]) for place in range(len(columns))]
    for row in [columns, *cells]:
        padded = [
            cell.rjust(width) if title in right else cell.ljust(width)
            for cell, width, title in zip(row, widths, columns, strict=True)
        ]
        sys.stdout.write(f"{'  '.join(padded).rstrip()}\n")


def _write_rich(columns: Sequence[str], rows: Rows, right: Sequence[str]) -> bool:
    """Whether `rich` is there and has done it."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in columns:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)
    return True


def printable(text: str) -> str:
    """Return text whose control characters (which could command the terminal) are written as escapes."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
