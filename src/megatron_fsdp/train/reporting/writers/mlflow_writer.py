"""Numbers of a run for MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord
from megatron_fsdp.train.reporting.writers.scalars import evaluation_scalars, step_scalars

ID_FILE = "mlflow_run.txt"
EXPERIMENT = "megatron_fsdp"
LONGEST_VALUE = 500  # of a parameter, by MLflow's own limit
BATCH = 900  # of metrics; MLflow takes 1,000 at a time


class MlflowWriter:
    """Logs to one run of the experiment `megatron_fsdp`, the same one after a restart; see `Writer`."""

    def __init__(self, folder: Path, tracking_uri: str, config: Mapping[str, Any]) -> None:
        """Log to a server or a folder.

        Args:
            folder: Of the run's results; its name is that of the run.
            tracking_uri: Where MLflow records.
            config: What the run was told, without secrets.
        """
        import mlflow

        self._metric: Any = mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._folder, self._config = folder, config
        self._run_id = ""

    def start(self, progress: Progress) -> None:  # noqa: ARG002  # MLflow keeps every value of a step
        """See `Writer`."""
        path = self._folder / ID_FILE
        if path.exists():
            self._run_id = path.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = self._client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        run_id = str(self._client.create_run(experiment, run_name=self._folder.name).info.run_id)
        path.write_text(run_id, encoding="utf-8")
        for name, value in self._config.items():
            self._client.log_param(run_id, name, str(value)[:LONGEST_VALUE])
        self._run_id = run_id

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """See `Writer`."""
        self._log([(name, value, r.step) for r in records for name, value in step_scalars(r).items()])

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """See `Writer`."""
        self._log([(name, value, evaluation.step) for name, value in evaluation_scalars(evaluation).items()])

    def close(self) -> None:
        """See `Writer`."""
        if self._run_id:
            self._client.set_terminated(self._run_id)

    def _log(self, values: Sequence[tuple[str, float, int]]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value, step in values]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + BATCH])
