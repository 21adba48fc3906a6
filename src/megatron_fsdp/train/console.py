"""What a run prints: header, progress and messages, in plain lines. Only the first rank prints."""

from __future__ import annotations

import io
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from megatron_fsdp.train.measure import FIGURES, Evaluation, StepRecord, Writer

LIBRARY_LOGGER = "megatron_fsdp"

Say = Callable[[str], None]


def console(*, is_first: bool) -> Say:
    """Return what prints lines to standard output, and on other ranks nothing; it never ends the program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that the encoding lacks

    def say(text: str) -> None:
        with suppress(OSError, ValueError):  # full, closed, or its reader (`| head`) is gone: files have everything
            print(printable(text), flush=True)  # noqa: T201

    return say if is_first else lambda _: None


def printable(text: str) -> str:
    """Replace characters that would control a terminal; a model's text or a file's name may have any."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


class _Handler(logging.Handler):
    """Prints log messages."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


@contextmanager
def library_messages(say: Say, level: int | None = None) -> Iterator[None]:
    """Print log messages inside the block: of all loggers from `level` on; None: the library's, from INFO on."""
    shown, handler = logging.getLogger(LIBRARY_LOGGER if level is None else None), _Handler(say)
    before = shown.level
    shown.addHandler(handler)
    shown.setLevel(logging.INFO if level is None else level)
    try:
        yield
    finally:
        shown.setLevel(before)
        shown.removeHandler(handler)


class Display(Writer):
    """Prints a line at each `--log-interval`, and one for each evaluation."""

    def __init__(self, say: Say, total_steps: int, limit_s: float = math.inf) -> None:
        """Prepare for `total_steps`, of which no more are done after `limit_s` seconds."""
        self.say, self._total_steps, self._limit_s = say, total_steps, limit_s

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Show the last of these steps, with the speeds of all of them."""
        last = averaged(records)
        left_s = max(0.0, min(last.step_s * (self._total_steps - last.step), self._limit_s - last.elapsed_s))
        self.say(f"step {last.step:>5}/{self._total_steps}  {figures(last)}  {duration(left_s)} left")

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Show a held-out loss."""
        self.say(f"step {evaluation.step:>5}/{self._total_steps}  held-out loss {evaluation.loss:.3f}")


def figures(record: StepRecord) -> str:
    """Return names and values of a step; what is not known is left out."""
    known = [(figure, value) for figure in FIGURES if figure.label and (value := figure.of(record)) is not None]
    return "  ".join(f"{figure.label} {figure.show(value)}" for figure, value in known)


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
