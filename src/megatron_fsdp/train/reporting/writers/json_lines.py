"""Steps and evaluations as lines of JSON; every step stands there exactly once, however often a run is restarted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord, from_line, to_line
from megatron_fsdp.train.reporting.writers.line_file import LineFile

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


class JsonLines:
    """Writes two files into the folder of a run; see `Writer`."""

    def __init__(self, folder: Path) -> None:
        """Write into a folder that is there."""
        self._steps = LineFile(folder / METRICS_FILE)
        self._evaluations = LineFile(folder / EVALUATIONS_FILE)

    def start(self, progress: Progress) -> None:
        """See `Writer`; a line that was torn when the run was killed goes, too."""

        def is_earlier(found: StepRecord | Evaluation | None) -> bool:
            return found is not None and found.step <= progress.steps

        self._steps.keep(lambda line: is_earlier(from_line(line, StepRecord)))
        self._evaluations.keep(lambda line: is_earlier(from_line(line, Evaluation)))

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """See `Writer`."""
        self._steps.append(map(to_line, records))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See `Writer`."""
        self._evaluations.append([to_line(evaluation)])

    def close(self) -> None:
        """See `Writer`."""
        for file in (self._steps, self._evaluations):
            if file.has_waiting:
                file.append([])
