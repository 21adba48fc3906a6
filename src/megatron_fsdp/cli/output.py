"""The output of commands: aligned text for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron_fsdp.describe.text import folded, table_lines, width
from megatron_fsdp.describe.text import in_bytes as in_bytes


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` to a parser."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def write_line(text: str = "", indent: int = 2, end: str = "") -> None:
    """Print text, folded to the terminal; `end` stands where a line goes on in the next one."""
    write_text(folded(printable(text), width(), indent, end))


def write_text(text: str) -> None:
    """Print text whose lines stay as they are, such as a table or JSON."""
    sys.stdout.write(f"{printable(text)}\n")


def write_json(value: Any) -> None:
    """Print JSON, indented."""
    write_text(json.dumps(value, indent=2, allow_nan=False))


def write_error(text: str) -> None:
    """Print a line to the error stream."""
    sys.stderr.write(f"error: {printable(text)}\n")


def write_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values, aligned."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        write_line(f"{name:<{width}}  {value}", indent=width + 2)


def write_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print a table; the columns with the titles `right` are aligned to the right."""
    write_text("\n".join(table_lines(titles, [[printable(cell) for cell in row] for row in rows], right, width())))


def printable(text: str) -> str:
    """Escape control characters, which could steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
