"""Keeps what a run measured, has it written down as it comes, and passes it on to the display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_fsdp.train.loop import Watcher
from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord, read_lines
from megatron_fsdp.train.reporting.writers.json_lines import EVALUATIONS_FILE, METRICS_FILE
from megatron_fsdp.train.reporting.writers.writer import Writer


class Recorder:
    """A watcher that remembers; on the first rank it also writes."""

    def __init__(self, display: Watcher, folder: Path | None, writers: Sequence[Writer] = ()) -> None:
        """Make a watcher.

        Args:
            display: Gets everything, too.
            folder: Of results, on the first rank; what an earlier run of this one left there is remembered.
            writers: Get everything, too.
        """
        self.records: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self._display = display
        self._folder = folder
        self._writers = writers

    def start(self, progress: Progress) -> None:
        """Begin, or go on: steps after these happen again, and are forgotten."""
        if self._folder is not None:
            self.records = [r for r in read_lines(self._folder / METRICS_FILE, StepRecord) if r.step <= progress.steps]
            earlier = read_lines(self._folder / EVALUATIONS_FILE, Evaluation)
            self.evaluations = [e for e in earlier if e.step <= progress.steps]
        for writer in self._writers:
            writer.start(progress)
        self._display.start(progress)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Keep, write and show these steps."""
        self.records.extend(records)
        for writer in self._writers:
            writer.on_steps(records)
        self._display.on_steps(records)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Keep, write and show a held-out loss."""
        self.evaluations.append(evaluation)
        for writer in self._writers:
            writer.on_evaluation(evaluation)
        self._display.on_evaluation(evaluation)

    def conclude(self, evaluation: Evaluation) -> None:
        """Keep the last held-out loss, of more samples than those on the way, in place of one after the same step."""
        self.evaluations = [*(e for e in self.evaluations if e.step != evaluation.step), evaluation]

    def lacks_evaluation(self, step: int) -> bool:
        """Whether this step is known and no held-out loss after it, as where the run was ended in between."""
        return any(r.step == step for r in self.records) and all(e.step != step for e in self.evaluations)

    def say(self, text: str) -> None:
        """Show a line or several."""
        self._display.say(text)

    def close(self) -> None:
        """End the writers."""
        for writer in self._writers:
            writer.close()
