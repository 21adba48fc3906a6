"""What the console prints, and that no output that fails ends a run."""

import io
import math
import os
import sys
from contextlib import suppress

import pytest

from megatron_fsdp.train.console import Display, averaged, console, duration, figures
from megatron_fsdp.train.measure import Evaluation
from tests.train.records import record


class FullDisk(io.StringIO):
    """A file that is full until there is room."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_reader_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with suppress(BrokenPipeError), os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        say = console(is_first=True)
        say("first")
        assert os.read(reading, 100) == b"first\n"
        os.close(reading)
        for _ in range(3):
            say("second")


def test_a_full_disk_ends_nothing_and_what_comes_later_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    file = FullDisk()
    monkeypatch.setattr(sys, "stdout", file)
    say = console(is_first=True)
    say("first")
    file.is_full = False
    say("second")
    assert file.getvalue() == "second\n"


def test_letters_that_the_output_has_not_and_what_would_steer_a_terminal_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    console(is_first=True)("caf\N{LATIN SMALL LETTER E WITH ACUTE}\n\x1b[31ma\x07")
    console(is_first=False)("nothing")
    assert written.getvalue().decode("ascii") == "caf?\n?[31ma?\n"


def test_each_interval_has_a_line_and_each_evaluation() -> None:
    lines: list[str] = []
    display = Display(lines.append, 300, limit_s=70.0)
    display.on_steps([record(step) for step in range(1, 11)])
    display.on_evaluation(Evaluation(10, 1.75))
    display.on_steps([record(step) for step in range(11, 290)])
    assert lines[0].startswith("step    10/300  loss 0.500  grad norm 1.50  tokens/s 64  ")
    assert lines[0].endswith("  skipped steps 0  1:05 left")  # the limit comes before the last step
    assert lines[1] == "step    10/300  held-out loss 1.750"
    assert lines[2].endswith("  0:00 left")


def test_speeds_are_those_of_all_steps_together() -> None:
    slow, fast = (
        record(1, tokens_per_s=10.0, tflops=1.0, step_s=3.0),
        record(2, tokens_per_s=30.0, tflops=3.0, step_s=1.0),
    )
    found = averaged([slow, fast])
    assert (found.step, found.loss) == (2, 2.5)
    assert (found.tokens_per_s, found.tflops, found.step_s) == (15.0, 1.5, 2.0)
    assert math.isnan(averaged([slow, record(2, mfu=math.nan)]).mfu)


def test_figures_are_short_and_those_that_are_not_known_are_left_out() -> None:
    assert figures(record(3, loss=1.23456, skipped=2, tflops=1234.5)) == (
        "loss 1.235  grad norm 1.50  tokens/s 64  TFLOP/s/rank 1,234  MFU 40.0%  step 500 ms  exposed comm 12.5%  "
        "memory peak 1.0 MiB  learning rate 1.00e-03  skipped steps 2"
    )
    assert figures(record(3, loss=math.nan, tflops=math.nan, mfu=math.nan, exposed_share=math.nan)) == (
        "loss nan  grad norm 1.50  tokens/s 64  step 500 ms  memory peak 1.0 MiB  learning rate 1.00e-03  "
        "skipped steps 0"
    )
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 7322)] == ["0:00", "1:00", "59:59", "2:02:02"]
