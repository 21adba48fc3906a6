"""A line per step in the style of Megatron-LM's log, so that whatever reads those finds its keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord
from megatron_fsdp.train.reporting.writers.line_file import LineFile

LOG_FILE = "train.log"

_ITERATION = re.compile(r"^ (?:\[[^]]*\] iteration|validation loss at iteration|> going on after iteration) +(\d+)")


def step_line(record: StepRecord, *, train_iters: int, batch: int, now: datetime) -> str:
    """Return the line of a step.

    Args:
        record: The step.
        train_iters: Steps of the whole run.
        batch: Samples of a step.
        now: Local time.
    """
    parts = [
        f"[{now:%Y-%m-%d %H:%M:%S}] iteration {record.step:8d}/{train_iters:8d}",
        f"consumed samples: {record.samples:12d}",
        f"elapsed time per iteration (ms): {record.step_s * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {record.tflops:.3g}" if math.isfinite(record.tflops) else "",
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {batch:5d}",
        f"lm loss: {record.loss:.6E}",
        f"loss scale: {record.loss_scale:.1f}",
        f"grad norm: {record.grad_norm:.3f}",
        f"number of skipped iterations: {int(record.is_skipped):3d}",
        f"number of nan iterations: {int(not math.isfinite(record.loss)):3d}",
    ]
    return f" {' | '.join(filter(None, parts))} |\n"


def evaluation_line(evaluation: Evaluation) -> str:
    """Return the line of a held-out loss."""
    return (
        f" validation loss at iteration {evaluation.step} | lm loss value: {evaluation.loss:.6E} | "
        f"lm loss PPL: {evaluation.perplexity:.6E} |\n"
    )


class MegatronLog:
    """Writes `train.log` into the folder of a run; see `Writer`."""

    def __init__(
        self, folder: Path, *, train_iters: int, batch: int, clock: Callable[[], datetime] | None = None
    ) -> None:
        """Write into a folder that is there; for the rest see `step_line`."""
        self._file = LineFile(folder / LOG_FILE)
        self._train_iters, self._batch = train_iters, batch
        self._clock = clock or (lambda: datetime.now().astimezone())

    def start(self, progress: Progress) -> None:
        """See `Writer`; a run that goes on says so in a line."""

        def is_kept(line: str) -> bool:
            found = _ITERATION.match(line)
            return found is not None and int(found[1]) <= progress.steps

        if self._file.keep(is_kept) or progress.steps:
            self._file.append([f" > going on after iteration {progress.steps} at {self._clock():%Y-%m-%d %H:%M:%S}\n"])

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """See `Writer`."""
        now = self._clock()
        self._file.append(
            step_line(record, train_iters=self._train_iters, batch=self._batch, now=now) for record in records
        )

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See `Writer`."""
        self._file.append([evaluation_line(evaluation)])

    def close(self) -> None:
        """See `Writer`."""
        if self._file.has_waiting:
            self._file.append([])
