"""What the console prints, into a text in place of a terminal; test_screen.py has the real one."""

import io
import math
import os
import re
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from megatron_fsdp.train.console import (
    ConsoleWatcher,
    averaged,
    duration,
    line_of,
    make_console,
    percent,
    print_message,
    printable,
    short_number,
    show_header,
)
from megatron_fsdp.train.measure import Evaluation, Progress
from tests.train.records import record


class FullDisk(io.StringIO):
    """A file that is full until there is room."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)

    def flush(self) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")


def test_a_reader_that_has_gone_ends_nothing() -> None:
    reading, writing = os.pipe()
    console = make_console(is_first=True)
    with suppress(BrokenPipeError), os.fdopen(writing, "w") as pipe:
        console.file = pipe
        console.print("first")
        assert os.read(reading, 100) == b"first\n"
        os.close(reading)
        for _ in range(3):
            console.print("second")
    assert console.quiet


def test_a_full_disk_ends_nothing_and_what_comes_later_is_written() -> None:
    console, file = make_console(is_first=True), FullDisk()
    console.file = file
    console.print("first")
    file.is_full = False
    console.print("second")
    assert file.getvalue().endswith("second\n")


def test_letters_that_the_output_has_not_are_replaced_and_frames_are_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    console = make_console(is_first=True)
    show_header(console, [("text", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")])
    lines = written.getvalue().decode("ascii").splitlines()
    assert lines[0].startswith("+-")
    assert "megatron_fsdp training" in lines[0]
    assert lines[1] == "| text  caf?".ljust(len(lines[0]) - 1) + "|"


def test_a_long_message_is_one_line_in_a_file_and_lines_of_words_on_a_terminal() -> None:
    message = " ".join(["No space left on device; training goes on"] * 5)
    for is_terminal, lines in ((False, 1), (True, 6)):
        text = io.StringIO()
        print_message(Console(file=text, width=40, force_terminal=is_terminal), message)
        assert " ".join(text.getvalue().split()) == message
        assert len(text.getvalue().splitlines()) == lines


def plain(total_steps: int, log_interval: int, eval_interval: int) -> list[str]:
    """What a run prints where there is no terminal."""
    text = io.StringIO()
    with ConsoleWatcher(Console(file=text, width=120), total_steps) as display:
        display.start(Progress())
        for last in range(log_interval, total_steps + 1, log_interval):
            display.on_steps([record(step) for step in range(last - log_interval + 1, last + 1)])
            if last % eval_interval == 0:
                display.on_evaluation(Evaluation(last, 2.0))
    return text.getvalue().splitlines()


@pytest.mark.parametrize(("total", "log", "evaluation"), [(1000, 1, 1000), (1000, 5, 10), (20, 1, 20)])
def test_a_pipe_gets_few_lines_and_the_last_step(total: int, log: int, evaluation: int) -> None:
    lines = plain(total, log, evaluation)
    steps = [line for line in lines if "tokens/s" in line]
    assert len(steps) <= 21
    assert len(lines) == len(steps) + 1
    assert steps[-1].startswith(f"step {total:>5}/{total}  loss ")
    assert lines[-1] == f"step {total:>5}/{total}  held-out loss 2.000"
    assert not any("\x1b" in line for line in lines)


def test_the_last_share_that_was_measured_stays() -> None:
    text = io.StringIO()
    display = ConsoleWatcher(Console(file=text, width=200), 3)
    display.on_steps([record(1, exposed_share=math.nan)])
    display.on_steps([record(2, exposed_share=0.25)])
    display.on_steps([record(3, exposed_share=math.nan)])
    shown = [re.findall(r"exposed comm (\S+)", line) for line in text.getvalue().splitlines()]
    assert shown == [[], ["25.0%"], ["25.0%"]]


def picture(width: int, *, limit_s: float = math.inf) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    display = ConsoleWatcher(console, 300, limit_s)
    display.start(Progress())
    display.on_steps([record(step) for step in range(1, 11)])
    display.on_evaluation(Evaluation(10, 1.75))
    with console.capture() as captured:
        console.print(display.picture())
    return [line.rstrip() for line in captured.get().splitlines()]


def test_eighty_columns_hold_bar_and_figures() -> None:
    lines = picture(80)
    assert lines[0].startswith("step 10/300 ━")
    assert lines[0].endswith("3%  2:25 left")  # 290 steps of half a second
    assert lines[1:] == [
        "loss               0.500  held-out loss      1.750  grad norm           1.50",
        "tokens/s              64  TFLOP/s/rank        1.25  MFU                40.0%",
        "step              500 ms  exposed comm       12.5%  memory peak      1.0 MiB",
        "learning rate   1.00e-03  skipped steps          0",
    ]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("width", [30, 50, 60, 79, 200])
def test_any_width_shows_every_figure(width: int) -> None:
    lines = picture(width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for name in ("loss", "grad norm", "tokens/s", "MFU", "exposed comm", "memory peak", "skipped steps", "left"):
        assert name in text
    narrow = picture(20)
    assert all(len(line) <= 20 for line in narrow)
    assert narrow[1:6] == ["loss 0.500", "held-out loss 1.750", "grad norm 1.50", "tokens/s 64", "TFLOP/s/rank 1.25"]


def test_a_limit_of_time_ends_the_run_before_its_steps() -> None:
    assert picture(80, limit_s=65.0)[0].endswith("1:00 left")
    assert picture(80, limit_s=1.0)[0].endswith("0:00 left")


def test_before_the_first_step_there_is_a_bar() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    display = ConsoleWatcher(console, 300)
    display.start(Progress(steps=30))
    with console.capture() as captured:
        console.print(display.picture())
    assert captured.get().startswith("step 30/300 ━")
    assert captured.get().rstrip().endswith("10%  first step ...")


@pytest.mark.parametrize(("no_color", "expected"), [("", True), ("1", False)])
def test_colours_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, no_color: str, expected: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLORTERM", raising=False)
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    display = ConsoleWatcher(console, 300)
    display.on_steps([record(100)])
    with console.capture() as captured:
        console.print(display.picture())
    assert bool(re.search(r"\x1b\[(?:\d;)*3\d", captured.get())) is expected


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = io.StringIO()
    with ConsoleWatcher(Console(file=text, width=200, force_terminal=True), 2) as display:
        display.on_steps([record(1)])
    assert text.getvalue().startswith("step     1/2  loss 5.000")
    assert "\x1b" not in text.getvalue()


def test_no_console_hides_the_cursor_and_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_console(is_first=True).show_cursor(False) is False
    make_console(is_first=False).print("nothing")
    assert capsys.readouterr().out == ""


def test_names_that_would_steer_a_terminal_do_not() -> None:
    console = Console(file=io.StringIO(), width=60, color_system=None)
    with console.capture() as captured:
        show_header(console, [("text", "a\x1b[2Jb")], [("config \x1b[2J", "--prompt \x1b]0;x\x07")])
        ConsoleWatcher(console, 3).say("first \x1b[31m")
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in captured.get()
    assert not {"\x1b", "\x07"} & set(captured.get())


def test_header_shows_facts_and_asides_and_leaves_nothing_out_where_it_is_narrow() -> None:
    path = "/a/folder/with/a/name/that/is/long"
    console = Console(file=io.StringIO(), width=40, color_system=None)
    with console.capture() as captured:
        show_header(console, [("ranks", "2 on cpu")], [("preset tiny", "--lr 1")])
        console.width = 24
        show_header(console, [("results", path)])
    lines = captured.get().splitlines()
    assert lines[1:3] == ["│ ranks        2 on cpu    │", "│ preset tiny  --lr 1      │"]
    assert "".join(line[11:-2].rstrip() for line in lines[5:-1]) == path


def test_speeds_are_those_of_all_steps_together() -> None:
    slow, fast = (
        record(1, tokens_per_s=10.0, tflops=1.0, step_s=3.0),
        record(2, tokens_per_s=30.0, tflops=3.0, step_s=1.0),
    )
    found = averaged([slow, fast])
    assert (found.step, found.loss) == (2, 2.5)
    assert (found.tokens_per_s, found.tflops, found.step_s) == (15.0, 1.5, 2.0)
    assert math.isnan(averaged([slow, record(2, mfu=math.nan)]).mfu)


def test_a_plain_line_has_every_figure_that_is_known() -> None:
    assert line_of(record(3, loss=1.23456, skipped=2), Evaluation(2, 1.75), 3700.0, 300) == (
        "step     3/300  loss 1.235  held-out loss 1.750  grad norm 1.50  tokens/s 64  TFLOP/s/rank 1.25  MFU 40.0%  "
        "step 500 ms  exposed comm 12.5%  memory peak 1.0 MiB  learning rate 1.00e-03  skipped steps 2  1:01:40 left"
    )
    unknown = line_of(record(3, tflops=math.nan, mfu=math.nan, exposed_share=math.nan), None, math.nan, 300)
    assert unknown == (
        "step     3/300  loss 1.667  grad norm 1.50  tokens/s 64  step 500 ms  memory peak 1.0 MiB  "
        "learning rate 1.00e-03  skipped steps 0  - left"
    )


def test_durations_and_numbers_are_short_and_dashes_where_they_are_not_known() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 7322)] == ["0:00", "1:00", "59:59", "2:02:02"]
    assert [short_number(math.nan), percent(math.nan), duration(math.inf)] == ["-", "-", "-"]
    assert [short_number(value) for value in (0.00123, 1.5, 99.96, 1234.5)] == ["0.00123", "1.5", "100", "1,234"]


def test_what_a_model_writes_cannot_steer_a_terminal() -> None:
    assert printable("a\n\x1b[31mé\x07\x9b") == "a\n\N{REPLACEMENT CHARACTER}[31mé" + 2 * "\N{REPLACEMENT CHARACTER}"
