"""What the console prints and whole runs show, and that no output that fails ends a run."""

import contextlib
import io
import json
import math
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_fsdp.train.console import Display, console, duration, figures, header, stamped
from megatron_fsdp.train.measure import Evaluation, StepRecord
from megatron_fsdp.train.recorder import read_lines
from tests.conftest import RunRanks
from tests.support.train_program import train
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
    display.close()
    assert lines[0].startswith("step  10/300  1:05 left  loss 0.500  MFU 40.0%  tokens/s 64  ")  # the limit comes first
    assert lines[1] == "step  10/300  held-out loss 1.750"
    assert lines[2].startswith("step 289/300  0:00 left  ")
    assert len(lines) == 3


def test_lines_fit_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("megatron_fsdp.train.console.is_terminal", lambda: True)
        say = stamped(lines.append)
    say("not as it was saved, so losses may differ from one run: --data-path was a.txt, contents 1, and is b.txt")
    lines += header([("options", "--some-flag with-a-value " * 30), ("steps", "3")])
    assert max(len(line) for text in lines for line in text.splitlines()) <= 80


def test_figures_are_short_and_those_that_are_not_known_or_do_not_fit_are_left_out() -> None:
    known = (
        "  loss 1.235  skipped 2  MFU 40.0%  tokens/s 64  norm 1.50  memory 1.0 MiB  exposed comm 12.5%  lr 1.00e-03"
    )
    assert figures(record(3, loss=1.23456, skipped=2), 200) == known
    assert figures(record(3, loss=1.23456, skipped=2), 60) == known[: known.index("  memory")]
    assert figures(record(3, loss=math.nan, mfu=math.nan, exposed_share=math.nan), 200) == (
        "  loss nan  tokens/s 64  norm 1.50  memory 1.0 MiB  lr 1.00e-03"
    )
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 7322)] == ["0:00", "1:00", "59:59", "2:02:02"]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def shown_by(*options: str) -> str:
    """What a rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        train(*options)
    return text.getvalue()


def test_the_first_rank_prints_a_line_an_interval_and_the_folder_gets_everything(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    steps = ("--train-iters", "12", "--log-interval", "4", "--eval-interval", "6", "--global-batch-size", "5")
    text, nothing = run_ranks(2, shown_by, *steps, *data, "--out", str(tmp_path))
    assert nothing == ""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if "/12  " in line]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", time) for time, _ in lines)
    assert max(len(line) for line in text.splitlines() if "/12  " in line) <= 100
    found = [(line[:10], "held-out loss" in line, " left  loss " in line) for _, line in lines]
    figures, losses = ([(f"step {step:>2}/12", held, not held) for step in (4, 6, 8, 12)] for held in (False, True))
    assert found == [figures[0], figures[1], losses[1], figures[2], figures[3], losses[3]]
    assert "TFLOP/s" not in text
    assert "MFU not shown: the peak of this device is unknown; give --peak-tflops" in text
    assert "3 units (Block; large ends embedding, head) beside the root" in text
    assert "\nbatch    global 5 = 2 ranks x 2 microbatches x 2 - 3 that only fill up\n" in text

    records = read_lines(tmp_path / "metrics.jsonl", StepRecord)
    assert [record.step for record in records] == list(range(1, 13))
    assert all(record.tflops > 0 for record in records)
    assert all((0 < record.exposed_share < 1) == (record.step % 4 == 0) for record in records)
    found = json.loads((tmp_path / "applied.json").read_text(), parse_constant=pytest.fail)
    assert (found["options"]["train_iters"], found["origins"]["train_iters"]) == (12, "command line")
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["progress"]["steps"] == 12
    assert summary["evaluations"][-1]["loss"] == summary["held_out_loss"]
