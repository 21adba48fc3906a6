"""Numbers of a run for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord
from megatron_fsdp.train.reporting.writers.scalars import evaluation_scalars, step_scalars


class TensorBoardWriter:
    """Writes event files through `torch.utils.tensorboard`; see `Writer`."""

    def __init__(self, folder: Path) -> None:
        """Write into a folder, which is made."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._open: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def start(self, progress: Progress) -> None:
        """See `Writer`; TensorBoard itself hides what an earlier run wrote of later steps."""
        self._writer = self._open(log_dir=str(self._folder), purge_step=progress.steps + 1)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """See `Writer`."""
        for record in records:
            self._add(step_scalars(record), record.step)
        self._writer.flush()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See `Writer`."""
        self._add(evaluation_scalars(evaluation), evaluation.step)
        self._writer.flush()

    def close(self) -> None:
        """See `Writer`."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
