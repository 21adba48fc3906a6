"""Which writers a run asked for; those of trackers are imported only then, and refused in words where missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_fsdp.optional_packages import require_installed
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import ReportingOptions
from megatron_fsdp.train.reporting.writers.json_lines import METRICS_FILE, JsonLines
from megatron_fsdp.train.reporting.writers.megatron_log import LOG_FILE, MegatronLog
from megatron_fsdp.train.reporting.writers.mlflow_writer import MlflowWriter
from megatron_fsdp.train.reporting.writers.tensorboard_writer import TensorBoardWriter
from megatron_fsdp.train.reporting.writers.wandb_writer import WandbWriter
from megatron_fsdp.train.reporting.writers.writer import Careful, Writer

_NEEDED = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb", "mlflow_tracking_uri": "mlflow"}


def require_writers(options: ReportingOptions) -> None:
    """Check that what was asked for is installed; nothing is imported.

    Raises:
        MissingPackageError: A package is missing.
    """
    for name, package in _NEEDED.items():
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            require_installed(package, flag, instead="leave it out")


def build_writers(job: Job, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> list[Writer]:
    """Return the writers of a run, for the first rank.

    Args:
        job: The run.
        folder: Of results.
        config: What the run was told, for trackers; without secrets.
        say: Tells the user of trouble.
    """
    asked, batch = job.options.reporting, job.batch.total
    makers: list[tuple[str, Callable[[], Writer]]] = [
        (METRICS_FILE, lambda: JsonLines(folder)),
        (LOG_FILE, lambda: MegatronLog(folder, train_iters=job.train_iters, batch=batch)),
    ]
    events, project, uri = asked.tensorboard_dir, asked.wandb_project, asked.mlflow_tracking_uri
    if events is not None:
        makers.append(("TensorBoard", lambda: TensorBoardWriter(events)))
    if project is not None:
        makers.append(("W&B", lambda: WandbWriter(folder, project, asked.wandb_exp_name, config)))
    if uri is not None:
        makers.append(("MLflow", lambda: MlflowWriter(folder, uri, config)))
    return [Careful(make, name, say) for name, make in makers]
