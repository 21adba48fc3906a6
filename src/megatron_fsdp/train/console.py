"""The console of a run: header, progress and results. Only the first rank has a console that writes."""

from __future__ import annotations

import io
import logging
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from megatron_fsdp.describe.description import in_bytes
from megatron_fsdp.train.measure import Evaluation, Progress, Row, StepRecord

LIBRARY_LOGGER = "megatron_fsdp"
PLAIN_WIDTH = 120
PLAIN_LINES = 20  # where there is no terminal
PACE_STEPS = 50  # steps from which the remaining time is estimated
UNKNOWN = "-"
_NAME_WIDTH, _VALUE_WIDTH = 14, 10  # three cells and the space between them fit into 80 columns


def make_console(*, is_first: bool) -> Console:
    """Make a console for this rank; those of other ranks are silent."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that the encoding lacks
    console = _Console(quiet=not is_first, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console


class _Console(Console):
    """A console that never ends the program, and never hides the cursor: a killed rank could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002  # as the base class
        """Leave the cursor as it is."""
        return False

    def on_broken_pipe(self) -> None:
        """Stop printing when the reader of the pipe is gone (`| head`): the files of the run have everything."""
        self.quiet = True

    def __exit__(self, *exception: Any) -> None:
        """Write what was printed, as far as that is possible: not on a full disk."""
        with suppress(OSError):
            super().__exit__(*exception)


def printable(text: str) -> str:
    """Replace characters that would control a terminal; a model's text or a file's name may have any."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def print_message(console: Console, text: str) -> None:
    """Print a text literally: wrapped on a terminal, on one line into a file, so that grep finds it."""
    console.print(Text(printable(text)), soft_wrap=not console.is_terminal)


class _ConsoleHandler(logging.Handler):
    """Prints log messages above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        print_message(self._console, self.format(record))


@contextmanager
def library_messages(console: Console, level: int | None = None) -> Iterator[None]:
    """Print log messages inside the block: of all loggers from `level` on; None: the library's, from INFO on."""
    library, root, handler = logging.getLogger(LIBRARY_LOGGER), logging.getLogger(), _ConsoleHandler(console)
    shown = library if level is None else root
    before = library.level, root.level
    shown.addHandler(handler)
    shown.setLevel(logging.INFO if level is None else level)
    library.setLevel(logging.INFO if level is None else logging.NOTSET)  # that of the root logger
    try:
        yield
    finally:
        library.setLevel(before[0])
        root.setLevel(before[1])
        shown.removeHandler(handler)


def show_header(console: Console, facts: Sequence[tuple[str, str]], asides: Sequence[tuple[str, str]] = ()) -> None:
    """Print a panel of names and values; asides are below, dimmed."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(overflow="fold")  # on a narrow terminal nothing is left out
    for name, value in facts:
        grid.add_row(Text(name, style="bold"), Text(printable(value)))
    for name, value in asides:
        grid.add_row(Text(printable(name), style="dim"), Text(printable(value), style="dim"))
    console.print(Panel(grid, title="megatron_fsdp training", expand=False))


class ConsoleWatcher:
    """Shows progress: a live display on a terminal, a few lines elsewhere; the consoles of other ranks are quiet."""

    def __init__(self, console: Console, total_steps: int, limit_s: float = math.inf) -> None:
        """Prepare for `total_steps`, of which no more are done after `limit_s` seconds; `with` shows the display."""
        self._console = console
        self._total_steps, self._limit_s = total_steps, limit_s
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._last: StepRecord | None = None  # with the speeds of all steps since the last update
        self._evaluation: Evaluation | None = None
        self._left_s = math.nan
        self._steps = 0
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._next_line = 1
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self.picture)

    def __enter__(self) -> ConsoleWatcher:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._live.stop()

    def start(self, progress: Progress) -> None:
        """Remember how far the run is."""
        self._steps = progress.steps

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Show the last of these steps."""
        shares = [r.exposed_share for r in (self._last, *records) if r is not None and not math.isnan(r.exposed_share)]
        last = replace(averaged(records), exposed_share=shares[-1] if shares else math.nan)  # as it was measured last
        self._pace.extend(record.step_s for record in records)
        by_steps = math.fsum(self._pace) / len(self._pace) * (self._total_steps - last.step)
        self._left_s = max(0.0, min(by_steps, self._limit_s - last.elapsed_s))
        self._last, self._steps = last, last.step
        if not self._is_live and (last.step >= self._next_line or last.step == self._total_steps):
            every = -(-self._total_steps // PLAIN_LINES)
            self._next_line = (last.step // every + 1) * every
            self._console.print(line_of(last, self._evaluation, self._left_s, self._total_steps), soft_wrap=True)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Show a held-out loss; without a terminal, on the next line, and the last one on its own line."""
        self._evaluation = evaluation
        if not self._is_live and evaluation.step == self._total_steps:
            self._console.print(f"step {evaluation.step:>5}/{self._total_steps}  held-out loss {evaluation.loss:.3f}")

    def say(self, text: str) -> None:
        """Print lines above the display."""
        print_message(self._console, text)

    def picture(self) -> Group:
        """Return what a terminal shows now."""
        done, total = self._steps, self._total_steps
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        left = "first step ..." if self._last is None else f"{duration(self._left_s)} left"
        bar.add_row(f"step {done:,}/{total:,}", ProgressBar(total, done), f"{100 * done // total}%  {left}")
        if self._last is None:
            return Group(bar)
        cells = figures(self._last, self._evaluation)
        if self._console.width < _NAME_WIDTH + _VALUE_WIDTH:
            return Group(bar, *(Text(f"{name} {value}", overflow="fold") for name, value in cells))
        shown = [
            Text.assemble((f"{name:<{_NAME_WIDTH}}", "dim"), (f"{value:>{_VALUE_WIDTH}}", "bold"), no_wrap=True)
            for name, value in cells
        ]
        return Group(bar, Columns(shown, padding=(0, 2)))


def figures(record: StepRecord, evaluation: Evaluation | None) -> list[tuple[str, str]]:
    """Return names and values of the last step and held-out loss; what is not known is left out."""
    found = {
        "loss": f"{record.loss:.3f}",
        "held-out loss": UNKNOWN if evaluation is None else f"{evaluation.loss:.3f}",
        "grad norm": f"{record.grad_norm:.2f}",
        "tokens/s": f"{record.tokens_per_s:,.0f}",
        "TFLOP/s/rank": short_number(record.tflops),
        "MFU": percent(record.mfu),
        "step": f"{record.step_s * 1000:,.0f} ms",
        "exposed comm": percent(record.exposed_share),
        "memory peak": in_bytes(record.peak_bytes),
        "learning rate": f"{record.learning_rate:.2e}",
        "skipped steps": f"{record.skipped}",
    }
    return [(name, value) for name, value in found.items() if value != UNKNOWN]


def line_of(record: StepRecord, evaluation: Evaluation | None, left_s: float, total_steps: int) -> str:
    """Return one line of all figures, for where there is no terminal."""
    shown = "  ".join(f"{name} {value}" for name, value in figures(record, evaluation))
    return f"step {record.step:>5}/{total_steps}  {shown}  {duration(left_s)} left"


def averaged(records: Sequence[StepRecord]) -> StepRecord:
    """Return the last of one or more records with the mean speeds of all of them."""
    total_s = math.fsum(record.step_s for record in records)

    def mean(name: str) -> float:
        return math.fsum(getattr(record, name) * record.step_s for record in records) / total_s

    return replace(
        records[-1],
        step_s=total_s / len(records),
        tokens_per_s=mean("tokens_per_s"),
        tflops=mean("tflops"),
        mfu=mean("mfu"),
    )


def short_number(value: float) -> str:
    """Format three digits of a number that is not negative, or a dash for NaN."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Format a share as a percentage, or a dash for NaN."""
    return UNKNOWN if math.isnan(share) else f"{100 * share:.1f}%"


def duration(seconds: float) -> str:
    """Format hours, minutes and seconds, such as `1:02:03` or `4:05`; a dash for NaN."""
    if not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_comparison(console: Console, rows: Sequence[Row]) -> None:
    """Print measured values beside planned ones."""
    table = Table("one rank, last step", Column("measured", justify="right"), Column("planned", justify="right"))
    for row in rows:
        table.add_row(row.what, f"{row.measured:,}", f"{row.formula:,}")
    console.print(table)
