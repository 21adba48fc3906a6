"""The output of commands: aligned text for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron_fsdp.describe.description import in_bytes as in_bytes
from megatron_fsdp.describe.description import table_lines


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` to a parser."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def write_line(text: str = "") -> None:
    """Print one line of text."""
    sys.stdout.write(f"{printable(text)}\n")


def write_json(value: Any) -> None:
    """Print JSON, indented."""
    sys.stdout.write(f"{json.dumps(value, indent=2, allow_nan=False)}\n")


def write_error(text: str) -> None:
    """Print a line to the error stream."""
    sys.stderr.write(f"error: {printable(text)}\n")


def write_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values, aligned."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        write_line(f"{name:<{width}}  {value}")


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print a table; the columns with the titles `right` are aligned to the right."""
    for line in table_lines(columns, [[printable(cell) for cell in row] for row in rows], right):
        write_line(line)


def printable(text: str) -> str:
    """Escape control characters, which could steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
