"""The output of a run: header, progress and messages, in plain lines. Only the first rank prints."""

from __future__ import annotations

import io
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from megatron_fsdp.describe.text import folded, is_terminal, width
from megatron_fsdp.train.measure import FIGURES, Evaluation, Progress, StepRecord, Writer

LIBRARY_LOGGER = "megatron_fsdp"
_STAMP = len("00:00:00 ")

Say = Callable[[str], None]


def console(*, is_first: bool) -> Say:
    """Return a function that prints lines to standard output, and on other ranks nothing; it never ends the program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that the encoding lacks

    def say(text: str) -> None:
        with suppress(OSError, ValueError):  # full, closed, or its reader (`| head`) is gone: files have everything
            print(printable(text), flush=True)  # noqa: T201

    return say if is_first else lambda _: None


def printable(text: str) -> str:
    """Replace control characters, which would steer the terminal; a model's text or a file's name may have any."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


@contextmanager
def library_messages(say: Say, level: int | None = None) -> Iterator[None]:
    """Print log messages inside the block: of all loggers from `level` on; None: the library's, from INFO on."""
    shown, handler = logging.getLogger(LIBRARY_LOGGER if level is None else None), logging.Handler()
    handler.emit = lambda record: say(handler.format(record))  # type: ignore[method-assign]
    before = shown.level
    shown.addHandler(handler)
    shown.setLevel(logging.INFO if level is None else level)
    try:
        yield
    finally:
        shown.setLevel(before)
        shown.removeHandler(handler)


def header(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of names and values; values are broken between words."""
    indent = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        yield folded(f"{name:<{indent}}{value}", width(), indent)


def stamped(say: Say) -> Say:
    """Return `say` with the time of day before each line of a text; at a terminal lines are broken between words."""
    is_folded = is_terminal()  # a log keeps an event in a line, which tools search

    def say_stamped(text: str) -> None:
        now = time.strftime("%H:%M:%S")
        lines = "\n".join(f"{now} {line}" for line in text.split("\n"))
        say(folded(lines, width(), _STAMP) if is_folded else lines)

    return say_stamped


class Display(Writer):
    """Prints a line at each `--log-interval`, or of shorter ones every `every_s` seconds, and one for each evaluation.

    At a terminal the last line is a bar.
    """

    def __init__(self, say: Say, total_steps: int, limit_s: float = math.inf, every_s: float = 0.0) -> None:
        """Prepare for `total_steps`; a run ends earlier after `limit_s` seconds."""
        self.say, self._total_steps, self._limit_s, self._every_s = say, total_steps, limit_s, every_s
        self._held: list[StepRecord] = []  # not shown yet
        self._shown_s = -math.inf
        self._bar: Any = None  # of rich; its one task is number 0

    def start(self, progress: Progress) -> None:
        """Draw the bar at a terminal."""
        if not is_terminal() or find_spec("rich") is None:
            return
        from rich import progress as bars
        from rich.console import Console

        own: Any = Console()
        own.show_cursor = lambda *_: False  # a rank may be killed before it could restore the cursor
        left = bars.TextColumn("steps  {task.fields[left]}")
        columns = bars.BarColumn(bar_width=None), bars.MofNCompleteColumn(), left
        self._bar = bars.Progress(*columns, console=own, auto_refresh=False, transient=True, redirect_stderr=False)
        self._bar.add_task("", total=self._total_steps, completed=progress.steps, left="")
        self._bar.start()

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Show the last of these steps, with the speeds of all since the last line."""
        self._held += records
        last = self._held[-1]
        if last.step == self._total_steps or time.monotonic() - self._shown_s >= self._every_s:
            self._show()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Show a held-out loss, after the steps before it."""
        if self._held:
            self._show()
        self.say(f"{self._place(evaluation.step)}  held-out loss {evaluation.loss:.3f}")

    def close(self) -> None:
        """Show the steps not shown yet, and remove the bar."""
        if self._held:
            self._show()
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        last = averaged(self._held)
        left_s = max(0.0, min(last.step_s * (self._total_steps - last.step), self._limit_s - last.elapsed_s))
        left = f"{duration(left_s)} left"
        place = self._place(last.step)
        self.say(f"{place}  {left}{figures(last, width() - _STAMP - len(place) - len(left) - 2)}")
        if self._bar is not None:
            self._bar.update(0, completed=last.step, left=left, refresh=True)
        self._held, self._shown_s = [], time.monotonic()

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"


def figures(record: StepRecord, columns: int) -> str:
    """Return names and values of a step, each after two spaces: the known ones that fit, the most important first."""
    text = ""
    for figure in FIGURES:
        value = figure.of(record)
        if not figure.label or value is None or (figure.field == "skipped" and not value):
            continue
        more = f"  {figure.label} {figure.show(value)}"
        if len(text) + len(more) > columns:
            break
        text += more
    return text


def averaged(records: Sequence[StepRecord]) -> StepRecord:
    """Return the last of one or more records with the mean speeds of all of them."""
    total_s = math.fsum(record.step_s for record in records)

    def mean(name: str) -> float:
        return math.fsum(getattr(record, name) * record.step_s for record in records) / total_s

    speeds = mean("tokens_per_s"), mean("tflops"), mean("mfu")
    last = replace(records[-1], step_s=total_s / len(records))
    return replace(last, tokens_per_s=speeds[0], tflops=speeds[1], mfu=speeds[2])


def duration(seconds: float) -> str:
    """Format hours, minutes and seconds, such as `1:02:03` or `4:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
