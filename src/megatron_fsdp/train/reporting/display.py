"""Progress while a run goes on: a live picture on a terminal, a few lines elsewhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.console import print_message, printable
from megatron_fsdp.train.reporting.facts import Facts, averaged, cells, duration, plain_line
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord

PLAIN_LINES = 20  # where there is no terminal
PACE_STEPS = 50  # the time left is reckoned from so many steps
_NAME_WIDTH, _VALUE_WIDTH = 14, 10  # three cells and the space between them fit into 80 columns


class ConsoleWatcher:
    """Shows progress; see `Watcher`."""

    def __init__(self, console: Console, total_steps: int, limit_s: float = math.inf) -> None:
        """Prepare a picture; `with` shows it and leaves it as it stands.

        Args:
            console: Of the first rank; those of others are quiet.
            total_steps: Steps of the whole run.
            limit_s: Seconds of training after which the run ends in any case.
        """
        self._console = console
        self._total_steps, self._limit_s = total_steps, limit_s
        self._pace: deque[float] = deque(maxlen=PACE_STEPS)
        self._facts: Facts | None = None
        self._steps = 0
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._gate = _Gate(total_steps)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self.picture)

    def __enter__(self) -> ConsoleWatcher:
        """Show the picture."""
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Leave it as it stands."""
        self._live.stop()

    def start(self, progress: Progress) -> None:
        """See `Watcher`."""
        self._steps = progress.steps

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Show the last of these steps."""
        last = averaged(records)
        self._pace.extend(record.step_s for record in records)
        shares = [record.exposed_share for record in records if not math.isnan(record.exposed_share)]
        before = self._facts
        self._facts = Facts(
            last,
            None if before is None else before.evaluation,
            shares[-1] if shares else (math.nan if before is None else before.exposed_share),
            self._left_s(last),
        )
        self._steps = last.step
        if not self._is_live and self._gate.opens(last.step):
            self._console.print(plain_line(self._facts, self._total_steps), soft_wrap=True)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Show a held-out loss; without a terminal, in the next line, and the last one by itself."""
        if self._facts is not None:
            facts = self._facts
            self._facts = Facts(facts.record, evaluation, facts.exposed_share, facts.left_s)
        if not self._is_live and evaluation.step == self._total_steps:
            self._console.print(f"step {evaluation.step:>5}/{self._total_steps}  held-out loss {evaluation.loss:.3f}")

    def say(self, text: str) -> None:
        """Print lines above the picture."""
        print_message(self._console, printable(text))

    def picture(self) -> Group:
        """What a terminal shows now."""
        done, total = self._steps, self._total_steps
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        left = "first step ..." if self._facts is None else f"{duration(self._facts.left_s)} left"
        bar.add_row(f"step {done:,}/{total:,}", ProgressBar(total, done), f"{100 * done // total}%  {left}")
        if self._facts is None:
            return Group(bar)
        if self._console.width < _NAME_WIDTH + _VALUE_WIDTH:
            return Group(bar, *(Text(f"{name} {value}", overflow="fold") for name, value in cells(self._facts)))
        return Group(bar, Columns([_cell(*cell) for cell in cells(self._facts)], padding=(0, 2)))

    def _left_s(self, last: StepRecord) -> float:
        """By the pace of the last steps; the limit ends the run earlier."""
        by_steps = math.fsum(self._pace) / len(self._pace) * (self._total_steps - last.step)
        return max(0.0, min(by_steps, self._limit_s - last.elapsed_s))


class _Gate:
    """Lets a line through now and then, and at the end."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps, self._every = total_steps, -(-total_steps // PLAIN_LINES)
        self._next = 1

    def opens(self, step: int) -> bool:
        """Whether to print a line about this step."""
        if step < self._next and step != self._total_steps:
            return False
        self._next = (step // self._every + 1) * self._every
        return True


def _cell(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<{_NAME_WIDTH}}", "dim"), (f"{value:>{_VALUE_WIDTH}}", "bold"), no_wrap=True)
