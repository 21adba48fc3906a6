"""What a person sees of a run: header, unit plan, progress, tables. Only the first rank has a console that writes."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megatron_fsdp.train.reporting.comparison import Row
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord

LIBRARY_LOGGER = "megatron_fsdp"
PLAIN_LINES = 20  # lines of progress where there is no terminal to draw a bar on
PLAIN_WIDTH = 120


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def make_console(*, is_first: bool) -> Console:
    """Return a console for this rank; those of other ranks swallow everything."""
    console = Console(quiet=not is_first, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    return console


class _ConsoleHandler(logging.Handler):
    """Prints log messages above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message as it is."""
        self._console.print(Text(self.format(record)))


@contextmanager
def library_messages(console: Console) -> Iterator[None]:
    """Show what the library logs (its unit plan among others) while the context lasts."""
    logger, handler = logging.getLogger(LIBRARY_LOGGER), _ConsoleHandler(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def show_header(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print a panel of names and values."""
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(Text(name, style="bold"), Text(value))
    console.print(Panel(grid, title="megatron_fsdp training", expand=False))


class ConsoleWatcher:
    """Shows progress: a live bar on a terminal, a line every few steps elsewhere."""

    def __init__(self, console: Console, total_steps: int) -> None:
        """Prepare a bar of `total_steps` steps; `with` shows and ends it."""
        self._console = console
        self._total_steps = total_steps
        self._line_every = max(1, total_steps // PLAIN_LINES)
        self._next_line = 1
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("training", total=total_steps)
        self._live = Live(self._picture("first step ..."), console=console, refresh_per_second=4)

    def __enter__(self) -> "ConsoleWatcher":
        """Show the bar."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Leave the bar as it stands."""
        self._live.stop()

    def _picture(self, status: str) -> Group:
        return Group(self._progress, Text(status))

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Show the last of these steps."""
        last = records[-1]
        status = describe_step(last)
        self._progress.update(self._task, completed=last.step)
        self._live.update(self._picture(status), refresh=self._console.is_terminal)
        if not self._console.is_terminal and (last.step >= self._next_line or last.step == self._total_steps):
            left_s = last.elapsed_s / last.step * (self._total_steps - last.step)
            self._console.print(f"step {last.step:>5}/{self._total_steps}  {status}  {left_s:.0f} s left")
            self._next_line = (last.step // self._line_every + 1) * self._line_every

    def say(self, text: str) -> None:
        """Print lines above the bar."""
        self._console.print(Text(text))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Show a held-out loss."""
        self._console.print(f"step {evaluation.step:>5}/{self._total_steps}  held-out loss {evaluation.loss:.3f}")


def describe_step(record: StepRecord) -> str:
    """Return what a progress bar shows of a step."""
    return (
        f"loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}  {record.tokens_per_s:,.0f} tokens/s  "
        f"peak {format_bytes(record.peak_bytes)} per rank"
    )


def show_comparison(console: Console, rows: Sequence[Row]) -> None:
    """Print measured values beside computed ones."""
    table = Table(title="One rank: measured and computed")
    table.add_column("what")
    for name in ("measured", "formula", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.what, _format(row.measured, row.unit), _format(row.formula, row.unit), f"{row.ratio:.3f}")
    console.print(table)


def _format(value: int, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{value:,}"
