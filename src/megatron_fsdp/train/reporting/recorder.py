"""The files of a run's folder: applied options, measurements step by step, and curves as pictures."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import torch

from megatron_fsdp.config.ddp_config_flags import off_flag_of
from megatron_fsdp.optional_packages import require
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.loop import Watcher
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import DDP_FIELDS, OPTIONS, Options, flag_for
from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.measure import Peak
from megatron_fsdp.train.reporting.metrics import Evaluation, Speed, StepRecord, read_lines
from megatron_fsdp.train.reporting.writers import EVALUATIONS_FILE, METRICS_FILE, Careful

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

APPLIED_FILE = "applied.json"
LOSS_FILE = "loss.png"
THROUGHPUT_FILE = "throughput.png"
MEMORY_FILE = "memory.png"
SMOOTHING = 0.9
_PRESET = "preset "
_SIZE_IN, _DPI = (8.0, 4.5), 150
_FIRST, _SECOND = "tab:blue", "tab:red"


class Recorder:
    """A watcher that keeps measurements and passes them on; on the first rank also to writers."""

    def __init__(self, display: Watcher, folder: Path | None, writers: Sequence[Careful] = ()) -> None:
        """Make a watcher.

        Args:
            display: Gets everything, too.
            folder: Of results, on the first rank; what an earlier run of this one left there is remembered.
            writers: Get everything, too.
        """
        self.records: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self._display, self._folder, self._writers = display, folder, writers
        self._everyone: tuple[Careful | Watcher, ...] = (*writers, display)

    def start(self, progress: Progress) -> None:
        """Begin, or resume: records of later steps are dropped, since these steps run again."""
        if self._folder is not None:
            steps = progress.steps
            self.records = [r for r in read_lines(self._folder / METRICS_FILE, StepRecord) if r.step <= steps]
            self.evaluations = [e for e in read_lines(self._folder / EVALUATIONS_FILE, Evaluation) if e.step <= steps]
        for watcher in self._everyone:
            watcher.start(progress)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Keep, write and show these steps."""
        self.records.extend(records)
        for watcher in self._everyone:
            watcher.on_steps(records)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Keep, write and show a held-out loss."""
        self.evaluations.append(evaluation)
        for watcher in self._everyone:
            watcher.on_evaluation(evaluation)

    def conclude(self, evaluation: Evaluation) -> None:
        """Keep the final held-out loss, of more samples, in place of one after the same step."""
        self.evaluations = [*(e for e in self.evaluations if e.step != evaluation.step), evaluation]

    def lacks_evaluation(self, step: int) -> bool:
        """Return whether this step is known without a held-out loss after it, as if the run was ended in between."""
        return any(r.step == step for r in self.records) and all(e.step != step for e in self.evaluations)

    def say(self, text: str) -> None:
        """Print one or more lines."""
        self._display.say(text)

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close()


def applied(job: Job) -> dict[str, Any]:
    """Return the whole run as plain values: every option with its value and origin, and what it was resolved to."""
    return {
        "version": __version__,
        "torch": torch.__version__,
        "options": {name: _plain(_value_of(job.options, name)) for name in (*OPTIONS, *DDP_FIELDS)},
        "origins": dict(job.options.origins),
        "engine": job.engine,
        "ddp": job.ddp.to_dict(),
        "sizes": asdict(job.sizes),
        "batch": {**asdict(job.batch), "microbatches": job.batch.microbatches, "filled": job.batch.filled},
        "dtype": _word(job.dtype),
        "schedule": asdict(job.schedule),
        "train_iters": job.train_iters,
        "seq_length": job.seq_length,
        "notices": list(job.notices),
    }


def tracker_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for trackers: all that `applied` says, flattened."""
    flat = {name: value for name, value in found.items() if not isinstance(value, Mapping)}
    flat.update(found["options"])
    flat.update({f"{part}.{name}": value for part in ("sizes", "batch", "ddp") for name, value in found[part].items()})
    return flat


def applied_rows(
    job: Job, rank: Rank, data: TokenData, folder: Path, speed: Speed, peak: Peak
) -> list[tuple[str, str]]:
    """Return the lines of the header.

    Args:
        job: The run.
        rank: This process.
        data: The tokens.
        folder: Of results.
        speed: What a step costs.
        peak: What a rank could do.
    """
    flops = "" if math.isnan(speed.flops) else f" and {speed.flops / 1e12:.3g} TFLOP"
    known = "" if math.isnan(peak.tflops) else f"{peak.tflops:.3g} TFLOP/s per rank, "
    said = [(origin, words) for origin, words in _said(job.options).items() if not origin.startswith(_PRESET)]
    return [
        ("engine", engine_words(job)),
        ("ranks", f"{rank.count} on {rank.device.type}{_sizes_words(job)}"),
        ("batch", _batch_words(job)),
        ("dtypes", _dtype_words(job)),
        ("text", str(job.options.data.data_path or "source of the Python standard library")),
        ("tokens", f"{data.training.count:,} to train on, {data.held_out.count:,} held out"),
        ("steps", f"{job.train_iters:,} of {job.tokens_per_step:,} tokens{flops}"),
        ("peak", f"{known}{peak.source}"),
        ("results", str(folder)),
        *(("as applied", f"{words} ({origin})") for origin, words in said),
        *(("notice", notice) for notice in (*job.notices, *data.notes)),
    ]


def preset_rows(options: Options) -> list[tuple[str, str]]:
    """Return the options that only a preset set, on one line."""
    return [(origin, words) for origin, words in _said(options).items() if origin.startswith(_PRESET)]


def engine_words(job: Job) -> str:
    """Describe the engine and its strategy."""
    if job.engine == "torch_fsdp2":
        return "torch FSDP2"
    if job.engine == "ddp":
        return "ddp, buckets" + (", distributed optimizer" if job.ddp.use_distributed_optimizer else "")
    outer = job.ddp.outer_dp_sharding_strategy
    across = "" if outer == "no_shard" else f", {outer} across"
    return f"{job.engine}, {job.ddp.data_parallel_sharding_strategy}{across}"


def _said(options: Options) -> dict[str, str]:
    """Return for each origin its options that hold, as flags."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in options.origins.items():
        by_origin.setdefault(origin, []).append(_spelled(options, name))
    return {origin: " ".join(words) for origin, words in by_origin.items()}


def _spelled(options: Options, name: str) -> str:
    flag, value = flag_for(name), _value_of(options, name)
    if value is True:
        return flag
    if value is False:
        return (OPTIONS[name].off_flags or (f"{flag} off",))[0] if name in OPTIONS else off_flag_of(DDP_FIELDS[name])
    words = [_word(part) for part in value] if isinstance(value, tuple) else [_word(value)]
    return shlex.join([flag, *words])


def _value_of(options: Options, name: str) -> Any:
    """Return the value of an option; user and password of an address are removed."""
    value = options.value(name)
    if name != "mlflow_tracking_uri" or value is None or "@" not in urlsplit(value).netloc:
        return value
    parts = urlsplit(value)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _sizes_words(job: Job) -> str:
    """Describe the parallel sizes, if there is more than data parallelism."""
    if job.sizes.is_data_only:
        return ""
    sizes = asdict(job.sizes)
    return ": " + " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")


def _batch_words(job: Job) -> str:
    """Return the arithmetic of the batch, such as `global 8 = 2 ranks x 1 microbatch x 4`."""
    batch = job.batch
    ranks = "1 rank" if batch.ranks == 1 else f"{batch.ranks} ranks"
    microbatches = "1 microbatch" if batch.microbatches == 1 else f"{batch.microbatches} microbatches"
    filled = f" - {batch.filled} that only fill up" if batch.filled else ""
    return f"global {batch.total} = {ranks} x {microbatches} x {batch.micro}{filled}"


def _dtype_words(job: Job) -> str:
    """Describe the dtypes of everything that has one."""
    found = job.precision
    return (
        f"compute {_word(found.compute)}, main weights {_word(found.main_params)}, main gradients "
        f"{_word(found.main_grads)}, gradient communication {_word(found.grad_comm)}"
    )


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str) or value is None else _word(value)


def plot_run(folder: Path, records: Sequence[StepRecord], evaluations: Sequence[Evaluation], title: str) -> list[Path]:
    """Plot loss, throughput and memory over the steps.

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
    _plot_losses(paths[0], records, evaluations, title)
    _plot_throughput(paths[1], records, title)
    _plot_memory(paths[2], records, title)
    return paths


def smooth(values: Sequence[float], factor: float = SMOOTHING) -> list[float]:
    """Return the exponential moving average, with bias correction (Kingma and Ba 2015, section 3).

    Values that are not finite leave the average as it is; before the first finite one it is NaN.
    """
    average, count, smoothed = 0.0, 0, []
    for value in values:
        if math.isfinite(value):
            count += 1
            average = factor * average + (1.0 - factor) * value
        smoothed.append(average / (1.0 - factor**count) if count else math.nan)
    return smoothed


def _plot_losses(path: Path, records: Sequence[StepRecord], evaluations: Sequence[Evaluation], title: str) -> None:
    """Plot the loss of every step, its moving average, and the held-out losses."""
    figure, axes = _picture(title, "loss (nats per token)")
    _plot_smoothed(axes, records, [record.loss for record in records], "training, ")
    if evaluations:
        steps, losses = [e.step for e in evaluations], [e.loss for e in evaluations]
        axes.plot(steps, losses, "o--", color=_SECOND, label="held-out text")
    axes.legend()
    figure.savefig(path)


def _plot_throughput(path: Path, records: Sequence[StepRecord], title: str) -> None:
    """Plot tokens per second of every step, and TFLOP/s on the right if known."""
    figure, axes = _picture(title, "tokens per second, all ranks")
    _plot_smoothed(axes, records, [record.tokens_per_s for record in records])
    axes.set_ylim(bottom=0.0)
    axes.legend(loc="lower right")
    factor = next((record.tflops / record.tokens_per_s for record in records if record.tflops > 0), math.nan)
    if not math.isnan(factor):  # one is the other, but for a factor
        right = axes.twinx()
        low, high = axes.get_ylim()
        right.set_ylim(low * factor, high * factor)
        right.set_ylabel("TFLOP/s per rank")
    figure.savefig(path)


def _plot_memory(path: Path, records: Sequence[StepRecord], title: str) -> None:
    """Plot the peak memory up to every step."""
    unit, name = (2**30, "GiB") if records[-1].peak_bytes >= 2**30 else (2**20, "MiB")
    figure, axes = _picture(title, f"peak of memory so far, largest rank ({name})")
    peaks = [record.peak_bytes / unit for record in records]
    axes.step([record.step for record in records], peaks, color=_FIRST, linewidth=2)
    axes.set_ylim(bottom=0.0)
    figure.savefig(path)


def _plot_smoothed(axes: Axes, records: Sequence[StepRecord], values: Sequence[float], prefix: str = "") -> None:
    steps = [record.step for record in records]
    axes.plot(steps, values, color=_FIRST, alpha=0.3, linewidth=1.0, label=f"{prefix}each step")
    axes.plot(steps, smooth(values), color=_FIRST, linewidth=2.0, label=f"{prefix}moving average")


def _picture(title: str, ylabel: str) -> tuple[Figure, Axes]:
    require("matplotlib", "a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    return figure, axes
