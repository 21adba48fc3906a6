"""The loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord

SMOOTHING = 0.9


def smooth(values: Sequence[float], factor: float = SMOOTHING) -> list[float]:
    """Return the exponential moving average, corrected for its start (Kingma and Ba 2015, section 3)."""
    average, smoothed = 0.0, []
    for count, value in enumerate(values, start=1):
        average = factor * average + (1.0 - factor) * value
        smoothed.append(average / (1.0 - factor**count))
    return smoothed


def plot_losses(path: Path, records: Sequence[StepRecord], evaluations: Sequence[Evaluation], title: str) -> None:
    """Write a PNG with the loss of every step, its moving average, and the held-out losses."""
    figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = [record.step for record in records], [record.loss for record in records]
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1.0, label="training, each step")
    axes.plot(steps, smooth(losses), color="tab:blue", linewidth=2.0, label="training, moving average")
    held_out = [evaluation.loss for evaluation in evaluations]
    axes.plot([evaluation.step for evaluation in evaluations], held_out, "o--", color="tab:red", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
