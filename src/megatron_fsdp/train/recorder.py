"""What is kept of a run: what was applied, every step and evaluation, in files and in trackers."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

import torch

from megatron_fsdp.config.ddp_config_flags import off_flag_of
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.console import ConsoleWatcher
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.measure import Evaluation, Progress, Speed, StepRecord
from megatron_fsdp.train.options.job import BatchPlan, Job
from megatron_fsdp.train.options.options import DDP_FIELDS, OPTIONS, Options, flag_for
from megatron_fsdp.train.ranks import Rank

APPLIED_FILE = "applied.json"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
WANDB_ID_FILE = "wandb_id.txt"
MLFLOW_ID_FILE = "mlflow_run.txt"
_PRESET = "preset "
_MLFLOW_EXPERIMENT = "megatron_fsdp"
_MLFLOW_STEPS = 50  # of at most 20 values each: MLflow takes 1,000 at once
_MLFLOW_VALUE = 500  # characters of a parameter, by MLflow's own limit
_WANDB_STEP = "iteration"
_WHO = re.compile(r"(?<=://)[^/?#\s\"'<>]*@")

Measured = TypeVar("Measured", StepRecord, Evaluation)


# ---- what was applied -----------------------------------------------------------------------------------------------


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


def applied_rows(job: Job, rank: Rank, data: TokenData, folder: Path, speed: Speed) -> list[tuple[str, str]]:
    """Return the lines of the header: what was decided, what was given and by whom, and the notices."""
    flops = "" if math.isnan(speed.flops) else f" and {speed.flops / 1e12:.3g} TFLOP"
    peak = "not known; --peak-tflops tells it, for MFU"
    if not math.isnan(speed.peak_tflops):
        peak = f"{speed.peak_tflops:.3g} TFLOP/s per rank"
    sizes, found = asdict(job.sizes), job.precision
    dtypes = {
        "compute": found.compute,
        "main weights": found.main_params,
        "main gradients": found.main_grads,
        "gradient communication": found.grad_comm,
    }
    cut = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")
    said = [(origin, words) for origin, words in _said(job.options).items() if not origin.startswith(_PRESET)]
    return [
        ("engine", engine_words(job)),
        ("ranks", f"{rank.count} on {rank.device.type}" + ("" if job.sizes.is_data_only else f": {cut}")),
        ("batch", _batch_words(job.batch)),
        ("dtypes", ", ".join(f"{name} {_word(dtype)}" for name, dtype in dtypes.items())),
        ("text", str(job.options.data.data_path or "source of the Python standard library")),
        ("tokens", f"{data.training.count:,} to train on, {data.held_out.count:,} held out"),
        ("steps", f"{job.train_iters:,} of {job.tokens_per_step:,} tokens{flops}"),
        ("peak", peak),
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


def _batch_words(batch: BatchPlan) -> str:
    """Return the arithmetic of the batch, such as `global 8 = 2 ranks x 1 microbatch x 4`."""
    ranks = "1 rank" if batch.ranks == 1 else f"{batch.ranks} ranks"
    microbatches = "1 microbatch" if batch.microbatches == 1 else f"{batch.microbatches} microbatches"
    filled = f" - {batch.filled} that only fill up" if batch.filled else ""
    return f"global {batch.total} = {ranks} x {microbatches} x {batch.micro}{filled}"


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str) or value is None else _word(value)


# ---- lines of JSON --------------------------------------------------------------------------------------------------


def to_json(value: object, indent: int | None = None) -> str:
    """Return strict JSON: numbers that are not finite become null, and unknown objects become text."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def to_line(measured: StepRecord | Evaluation) -> str:
    """Return one line of JSON, with its end."""
    return to_json(asdict(measured)) + "\n"


def from_line(line: str, cls: type[Measured]) -> Measured | None:
    """Parse a line of `to_line`, with NaN for null; None if the line is torn or something else."""
    try:
        found = json.loads(line)
        names = [field.name for field in fields(cls) if field.name in found]
        values: dict[str, Any] = {name: math.nan if found[name] is None else found[name] for name in names}
        return cls(**values) if isinstance(values.get("step"), int) else None
    except (ValueError, TypeError):
        return None


def read_lines(path: Path, cls: type[Measured]) -> list[Measured]:
    """Read the whole lines of a file; empty if there is no file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = [from_line(line, cls) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [measured for measured in found if measured is not None]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


# ---- writers --------------------------------------------------------------------------------------------------------


class Writer(Protocol):
    """Writes steps and evaluations; made where a run begins or resumes, and later steps are removed then."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Write the steps since the last call."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write a held-out loss."""

    def close(self) -> None:
        """Write what is left, and close."""


Makers = Mapping[str, Callable[[Progress], Writer]]
"""What makes each writer, by the name that messages use."""


def find_writers(job: Job, folder: Path, config: Mapping[str, Any]) -> Makers:
    """Return the writers of a run, for the first rank; trackers get its options as `config`, without secrets."""
    asked = job.options.reporting
    makers: dict[str, Callable[[Progress], Writer]] = {METRICS_FILE: lambda progress: JsonLines(folder, progress)}
    events, project, uri = asked.tensorboard_dir, asked.wandb_project, asked.mlflow_tracking_uri
    if events is not None:
        makers["TensorBoard"] = lambda progress: _TensorBoard(events, progress)
    if project is not None:
        makers["W&B"] = lambda _: _Wandb(folder, project, asked.wandb_exp_name, config)
    if uri is not None:
        makers["MLflow"] = lambda _: _Mlflow(folder, uri, config)
    return makers


class LineFile:
    """A text file that grows by whole lines, and survives a full disk, a kill while writing, and a restart.

    What could not be written waits for the next try, so that no line is lost or torn.
    """

    def __init__(self, path: Path) -> None:
        """Wrap a path, which need not exist."""
        self._path = path
        self._waiting: list[str] = []

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Keep the whole lines that `is_kept` accepts; the file is replaced atomically."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and is_kept(line)]
        if kept != lines:
            whole = self._path.with_name(f"{self._path.name}.new")
            whole.write_text("".join(kept), encoding="utf-8")
            whole.replace(self._path)

    def append(self, lines: Iterable[str]) -> None:
        """Append lines; where that raises an OSError, the file is as it was, and they wait for the next time."""
        self._waiting.extend(lines)
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            text = "".join(self._waiting).encode()
            try:
                written = file.write(text)
                if written != len(text):  # the disk is full: the system writes what fits in
                    file.write(text[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), size)  # takes a torn line off again
                raise
        self._waiting.clear()

    def flush(self) -> None:
        """Write what could not be written before."""
        if self._waiting:
            self.append([])


class JsonLines:
    """Writes steps and evaluations as lines of JSON; every step is there once, however often a run restarts."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        """Write two files into an existing folder; drop later steps, and a line that was torn by a kill."""
        self._steps = LineFile(folder / METRICS_FILE)
        self._evaluations = LineFile(folder / EVALUATIONS_FILE)

        def is_earlier(found: StepRecord | Evaluation | None) -> bool:
            return found is not None and found.step <= progress.steps

        self._steps.keep(lambda line: is_earlier(from_line(line, StepRecord)))
        self._evaluations.keep(lambda line: is_earlier(from_line(line, Evaluation)))

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Append steps."""
        self._steps.append(map(to_line, records))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation."""
        self._evaluations.append([to_line(evaluation)])

    def close(self) -> None:
        """Flush both files."""
        self._steps.flush()
        self._evaluations.flush()


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return a step's scalars for trackers, by Megatron-LM's names where it has them; unknown ones are left out."""
    maybe = {
        "throughput": record.tflops,
        "mfu": record.mfu,
        "exposed-communication": record.exposed_share,
        "params-norm": record.params_norm,
        "num-zeros": record.num_zeros_in_grad,
    }
    return {
        "lm loss": record.loss,
        "grad-norm": record.grad_norm,
        "learning-rate": record.learning_rate,
        "loss-scale": record.loss_scale,
        "iteration-time": record.step_s,
        "tokens-per-second": record.tokens_per_s,
        "consumed-samples": float(record.samples),
        "skipped-iterations": float(record.skipped),
        "mem-peak-bytes": float(record.peak_bytes),
        **{name: value for name, value in maybe.items() if not math.isnan(value)},
    }


class _Tracker(Writer):
    """A writer of scalars; constructors import packages, so only those that were asked for."""

    @abstractmethod
    def log(self, values: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log the scalars of steps by name."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        self.log([(record.step, step_scalars(record)) for record in records])

    def on_evaluation(self, evaluation: Evaluation) -> None:
        scalars = {"lm loss validation": evaluation.loss, "lm loss validation ppl": evaluation.perplexity}
        self.log([(evaluation.step, scalars)])


class _TensorBoard(_Tracker):
    """Writes event files through `torch.utils.tensorboard`."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        make: Any = SummaryWriter
        # TensorBoard itself hides what an earlier run wrote of later steps.
        self._writer = make(log_dir=str(folder), purge_step=progress.steps + 1)

    def log(self, values: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, scalars in values:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb(_Tracker):
    """Logs to one run of a project at Weights & Biases, the same one after a restart.

    The iteration is logged as a value, and is the axis of every chart: a step that runs again after a restart is drawn
    over the first time.
    """

    def __init__(self, folder: Path, project: str, name: str | None, config: Mapping[str, Any]) -> None:
        import wandb

        path = folder / WANDB_ID_FILE
        if not path.exists():
            path.write_text(uuid.uuid4().hex, encoding="utf-8")
        library: Any = wandb
        self._run = library.init(
            project=project,
            name=name,
            config=dict(config),
            dir=str(folder),
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            save_code=False,
        )
        self._run.define_metric(_WANDB_STEP)
        self._run.define_metric("*", step_metric=_WANDB_STEP)

    def log(self, values: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, scalars in values:
            self._run.log({**scalars, _WANDB_STEP: step})

    def close(self) -> None:
        self._run.finish()


class _Mlflow(_Tracker):
    """Logs to one run, named after the folder, of the experiment `megatron_fsdp`; the same one after a restart."""

    def __init__(self, folder: Path, tracking_uri: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._metric: Any = mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        path = folder / MLFLOW_ID_FILE
        if path.exists():
            self._run_id = path.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(_MLFLOW_EXPERIMENT)
        experiment = self._client.create_experiment(_MLFLOW_EXPERIMENT) if found is None else found.experiment_id
        self._run_id = str(self._client.create_run(experiment, run_name=folder.name).info.run_id)
        path.write_text(self._run_id, encoding="utf-8")
        for name, value in config.items():
            self._client.log_param(self._run_id, name, str(value)[:_MLFLOW_VALUE])

    def log(self, values: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        now_ms = int(time.time() * 1000)
        for first in range(0, len(values), _MLFLOW_STEPS):
            metrics = [
                self._metric(name, value, now_ms, step)
                for step, scalars in values[first : first + _MLFLOW_STEPS]
                for name, value in scalars.items()
            ]
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Recorder:
    """Keeps what is measured, and passes it on to the display and to writers; what these raise never ends the run."""

    def __init__(self, display: ConsoleWatcher, folder: Path | None = None, makers: Makers | None = None) -> None:
        """Keep also what an earlier run of this one left in `folder`; only the first rank has one, and writers."""
        self.records: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self._display, self._folder, self._makers = display, folder, makers or {}
        self._writers: dict[str, Writer] = {}
        self._failed: set[str] = set()

    def start(self, progress: Progress) -> None:
        """Begin, or resume: records of later steps are dropped, since these steps run again."""
        if self._folder is not None:
            steps = progress.steps
            self.records = [r for r in read_lines(self._folder / METRICS_FILE, StepRecord) if r.step <= steps]
            self.evaluations = [e for e in read_lines(self._folder / EVALUATIONS_FILE, Evaluation) if e.step <= steps]
        for name, make in self._makers.items():
            with self._forgiving(name):
                self._writers[name] = make(progress)
        self._display.start(progress)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Keep, write and show these steps."""
        self.records.extend(records)
        for name, writer in self._writers.items():
            with self._forgiving(name):
                writer.on_steps(records)
        self._display.on_steps(records)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Keep, write and show a held-out loss."""
        self.evaluations.append(evaluation)
        for name, writer in self._writers.items():
            with self._forgiving(name):
                writer.on_evaluation(evaluation)
        self._display.on_evaluation(evaluation)

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
        for name, writer in self._writers.items():
            with self._forgiving(name):
                writer.close()

    @contextmanager
    def _forgiving(self, name: str) -> Iterator[None]:
        """Say once what a writer raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever a tracker or a disk raises, training goes on
            if name not in self._failed:
                self._failed.add(name)
                told = _WHO.sub("", str(error))  # without the passwords of addresses
                self.say(f"{name} cannot be written ({told}): training goes on, with gaps in it or without it")
