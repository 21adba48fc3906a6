"""Numbers of a run for Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord
from megatron_fsdp.train.reporting.writers.scalars import evaluation_scalars, step_scalars

ID_FILE = "wandb_id.txt"
ITERATION = "iteration"


class WandbWriter:
    """Logs to one run of a project, the same one after a restart; see `Writer`.

    The iteration is a value like all others, on the axis of every chart: a step that happens again after a restart is
    drawn over the first time.
    """

    def __init__(self, folder: Path, project: str, name: str | None, config: Mapping[str, Any]) -> None:
        """Log to a project.

        Args:
            folder: Of the run's results.
            project: At Weights & Biases.
            name: Of the run; None: they choose one.
            config: What the run was told, without secrets.
        """
        import wandb

        self._library: Any = wandb
        self._folder, self._project, self._name, self._config = folder, project, name, config
        self._run: Any = None

    def start(self, progress: Progress) -> None:  # noqa: ARG002  # the id says which run goes on
        """See `Writer`."""
        self._run = self._library.init(
            project=self._project,
            name=self._name,
            config=dict(self._config),
            dir=str(self._folder),
            id=kept_id(self._folder / ID_FILE),
            resume="allow",
            save_code=False,
        )
        self._run.define_metric(ITERATION)
        self._run.define_metric("*", step_metric=ITERATION)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """See `Writer`."""
        for record in records:
            self._run.log({**step_scalars(record), ITERATION: record.step})

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See `Writer`."""
        self._run.log({**evaluation_scalars(evaluation), ITERATION: evaluation.step})

    def close(self) -> None:
        """See `Writer`."""
        if self._run is not None:
            self._run.finish()


def kept_id(path: Path) -> str:
    """Return the id that stands in a file; write a new one where there is none."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    new = uuid.uuid4().hex
    path.write_text(new, encoding="utf-8")
    return new
