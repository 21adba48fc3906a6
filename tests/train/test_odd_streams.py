"""Programs whose standard streams are full or closed."""

import os
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.support.forked_programs import Program, trainer
from tests.support.train_program import LIMIT_S, OPTIONS, environment


def on_a_full_disk(argv: Sequence[str]) -> int:
    full = os.open("/dev/full", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(full, stream)
    return trainer(argv)


def with_closed_streams(argv: Sequence[str]) -> int:
    for stream in (0, 1, 2):
        os.close(stream)
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as Python does
    return trainer(argv)


@pytest.mark.parametrize("program", [on_a_full_disk, with_closed_streams])
def test_a_wrong_option_has_its_code_where_it_cannot_be_told(program: Callable[[Sequence[str]], int]) -> None:
    run = Program(program, [*OPTIONS, "--lr", "-1"], environment())
    run.communicate(timeout=LIMIT_S)
    assert run.returncode == 2
