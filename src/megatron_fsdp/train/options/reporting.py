"""The options about what a person sees of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReportingOptions:
    """What is shown and written.

    Attributes:
        out: Folder for results; default: below `runs/`, named after the run or the date.
        log_interval: Steps between updates of the display and lines of the log's files.
        log_exposed_communication: Measure in one step of each interval how much communication was waited for.
        tensorboard_dir: Folder for TensorBoard; default: none.
        wandb_project: Project for Weights & Biases; default: none.
        wandb_exp_name: Name of the run there; default: they choose one.
        mlflow_tracking_uri: Where MLflow records the run; default: nowhere.
        peak_tflops: What one device could do, in 10^12 operations per second, for MFU; default: by the device's name,
            or measured on a CPU.
        prompt: Text that the trained model continues; empty: it writes nothing.
        sample_tokens: Tokens that it adds.
    """

    out: Path | None = None
    log_interval: int = 5
    log_exposed_communication: bool = True
    tensorboard_dir: Path | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    mlflow_tracking_uri: str | None = None
    peak_tflops: float | None = None
    prompt: str = "def "
    sample_tokens: int = 300
