"""The curves of a run as pictures: loss, throughput and memory over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHING = 0.9
LOSS_FILE = "loss.png"
THROUGHPUT_FILE = "throughput.png"
MEMORY_FILE = "memory.png"

_SIZE_IN, _DPI = (8.0, 4.5), 150
_FIRST, _SECOND = "tab:blue", "tab:red"


def smooth(values: Sequence[float], factor: float = SMOOTHING) -> list[float]:
    """Return the exponential moving average, corrected for its start (Kingma and Ba 2015, section 3).

    Values that are not finite leave the average as it is; before the first finite one it is NaN.
    """
    average, count, smoothed = 0.0, 0, []
    for value in values:
        if math.isfinite(value):
            count += 1
            average = factor * average + (1.0 - factor) * value
        smoothed.append(average / (1.0 - factor**count) if count else math.nan)
    return smoothed


def plot_run(folder: Path, records: Sequence[StepRecord], evaluations: Sequence[Evaluation], title: str) -> list[Path]:
    """Write all pictures of a run.

    Args:
        folder: Where to; there already.
        records: Of every step, at least one.
        evaluations: On held-out text.
        title: Above each picture.

    Returns:
        The PNG files.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    paths = [folder / name for name in (LOSS_FILE, THROUGHPUT_FILE, MEMORY_FILE)]
    plot_losses(paths[0], records, evaluations, title)
    plot_throughput(paths[1], records, title)
    plot_memory(paths[2], records, title)
    return paths


def plot_losses(path: Path, records: Sequence[StepRecord], evaluations: Sequence[Evaluation], title: str) -> None:
    """Write a PNG with the loss of every step, its moving average, and the held-out losses; see `plot_run`."""
    figure, axes = _new(title, "loss (nats per token)")
    steps, losses = [record.step for record in records], [record.loss for record in records]
    axes.plot(steps, losses, color=_FIRST, alpha=0.3, linewidth=1.0, label="training, each step")
    axes.plot(steps, smooth(losses), color=_FIRST, linewidth=2.0, label="training, moving average")
    held_out = [evaluation.loss for evaluation in evaluations]
    if held_out:
        axes.plot(
            [evaluation.step for evaluation in evaluations], held_out, "o--", color=_SECOND, label="held-out text"
        )
    axes.legend()
    figure.savefig(path)


def plot_throughput(path: Path, records: Sequence[StepRecord], title: str) -> None:
    """Write a PNG with tokens per second of every step, and TFLOP/s on the right where known; see `plot_run`."""
    figure, axes = _new(title, "tokens per second, all ranks")
    steps, tokens = [record.step for record in records], [record.tokens_per_s for record in records]
    axes.plot(steps, tokens, color=_FIRST, alpha=0.3, linewidth=1.0, label="each step")
    axes.plot(steps, smooth(tokens), color=_FIRST, linewidth=2.0, label="moving average")
    axes.set_ylim(bottom=0.0)
    axes.legend(loc="lower right")
    factor = next((record.tflops / record.tokens_per_s for record in records if record.tflops > 0), math.nan)
    if not math.isnan(factor):  # one is the other, but for a factor
        right = axes.twinx()
        low, high = axes.get_ylim()
        right.set_ylim(low * factor, high * factor)
        right.set_ylabel("TFLOP/s per rank")
    figure.savefig(path)


def plot_memory(path: Path, records: Sequence[StepRecord], title: str) -> None:
    """Write a PNG with the peak of memory up to every step; see `plot_run`."""
    unit, name = (2**30, "GiB") if records[-1].peak_bytes >= 2**30 else (2**20, "MiB")
    figure, axes = _new(title, f"peak of memory so far, largest rank ({name})")
    peaks = [record.peak_bytes / unit for record in records]
    axes.step([record.step for record in records], peaks, color=_FIRST, linewidth=2)
    axes.set_ylim(bottom=0.0)
    figure.savefig(path)


def _new(title: str, ylabel: str) -> tuple[Figure, Axes]:
    """An empty picture over steps."""
    require("matplotlib", "a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    return figure, axes
