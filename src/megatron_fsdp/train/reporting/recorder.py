"""Keeps what a run measured, writes it down as it comes, and passes it on to the display."""

from collections.abc import Sequence
from pathlib import Path

from megatron_fsdp.train.loop import Watcher
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord, append_records

METRICS_FILE = "metrics.jsonl"


class Recorder:
    """A watcher that remembers; on the first rank it also writes."""

    def __init__(self, display: Watcher, folder: Path | None) -> None:
        """Pass everything on to `display`, and write steps into `folder` if one is given."""
        self.records: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self._display = display
        self._folder = folder

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Keep, write and show these steps."""
        self.records.extend(records)
        if self._folder is not None:
            append_records(self._folder / METRICS_FILE, records)
        self._display.on_steps(records)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Keep and show a held-out loss."""
        self.evaluations.append(evaluation)
        self._display.on_evaluation(evaluation)

    def say(self, text: str) -> None:
        """Show a line or several."""
        self._display.say(text)
