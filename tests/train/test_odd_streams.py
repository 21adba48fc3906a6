"""Whole runs whose standard streams are full, closed, or of an encoding that lacks letters."""

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.forked_programs import Program, trainer
from tests.support.train_program import LIMIT_S, OPTIONS, environment, write_text


def on_a_full_disk(argv: Sequence[str]) -> int:
    full = os.open("/dev/full", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(full, stream)
    return trainer(argv)


def in_ascii(argv: Sequence[str]) -> int:
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="ascii")
    return trainer(argv)


def with_closed_streams(argv: Sequence[str]) -> int:
    for stream in (0, 1, 2):
        os.close(stream)
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python does
    return trainer(argv)


@pytest.mark.full
@pytest.mark.parametrize("program", [on_a_full_disk, in_ascii])
def test_odd_streams_end_no_run(program: Callable[[Sequence[str]], int], tmp_path: Path) -> None:
    out, text = tmp_path / "out", write_text(tmp_path / "caf\N{LATIN SMALL LETTER E WITH ACUTE}.txt")
    run = Program(program, [*OPTIONS, "--nproc", "1", "--data-path", str(text), "--out", str(out)], environment())
    shown, errors = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, (shown, errors)
    assert json.loads((out / "summary.json").read_text())["progress"]["steps"] == 8
    if program is in_ascii:
        assert "caf?.txt" in shown


@pytest.mark.parametrize("program", [on_a_full_disk, with_closed_streams])
def test_a_wrong_option_has_its_code_where_it_cannot_be_told(program: Callable[[Sequence[str]], int]) -> None:
    run = Program(program, [*OPTIONS, "--lr", "-1"], environment())
    run.communicate(timeout=LIMIT_S)
    assert run.returncode == 2
