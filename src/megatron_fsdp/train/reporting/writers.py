"""Writers of a run's numbers: files in its folder, and trackers that were asked for.

Writers live on the first rank only. They go through `Careful`, so that nothing that they raise ends the run.
"""

from __future__ import annotations

import math
import os
import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from megatron_fsdp.optional_packages import require_installed
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import ReportingOptions
from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord, from_line, to_line

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
LOG_FILE = "train.log"
WANDB_ID_FILE = "wandb_id.txt"
MLFLOW_ID_FILE = "mlflow_run.txt"
_MLFLOW_EXPERIMENT = "megatron_fsdp"
_MLFLOW_VALUE = 500  # characters of a parameter, by MLflow's own limit
_MLFLOW_BATCH = 900  # of metrics; MLflow takes 1,000 at a time
_WANDB_STEP = "iteration"
_NEEDED = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb", "mlflow_tracking_uri": "mlflow"}
_WHO = re.compile(r"(?<=://)[^/?#\s\"'<>]*@")
_LOGGED = re.compile(r"^ (?:\[[^]]*\] iteration|validation loss at iteration|> going on after iteration) +(\d+)")


class Writer(Protocol):
    """The interface of a writer.

    It is built where a run begins, or resumes after the steps of a `progress`: later steps are removed, since they run
    again.
    """

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Write the steps since the last call."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write a held-out loss."""

    def close(self) -> None:
        """Write what is left, and close."""


def require_writers(options: ReportingOptions) -> None:
    """Check that packages of requested writers are installed; nothing is imported.

    Raises:
        MissingPackageError: A package is missing.
    """
    for name, package in _NEEDED.items():
        if getattr(options, name) is not None:
            require_installed(package, f"--{name.replace('_', '-')}", instead="leave it out")


def build_writers(job: Job, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> list[Careful]:
    """Build the writers of a run, for the first rank.

    Args:
        job: The run.
        folder: Of results.
        config: What the run was told, for trackers; without secrets.
        say: Tells the user of trouble.
    """
    asked, batch = job.options.reporting, job.batch.total
    makers: list[tuple[str, Callable[[Progress], Writer]]] = [
        (METRICS_FILE, lambda progress: JsonLines(folder, progress)),
        (LOG_FILE, lambda progress: MegatronLog(folder, progress, train_iters=job.train_iters, batch=batch)),
    ]
    events, project, uri = asked.tensorboard_dir, asked.wandb_project, asked.mlflow_tracking_uri
    if events is not None:
        makers.append(("TensorBoard", lambda progress: _TensorBoard(events, progress)))
    if project is not None:
        makers.append(("W&B", lambda _: _Wandb(folder, project, asked.wandb_exp_name, config)))
    if uri is not None:
        makers.append(("MLflow", lambda _: _Mlflow(folder, uri, config)))
    return [Careful(make, name, say) for name, make in makers]


class Careful:
    """A writer that never raises: training is worth more than its log."""

    def __init__(self, make: Callable[[Progress], Writer], target: str, say: Callable[[str], None]) -> None:
        """Pass everything on to the writer that `make` builds at the start; say once if `target` fails."""
        self._make, self._target, self._say = make, target, say
        self._writer: Writer | None = None
        self._has_warned = False

    def start(self, progress: Progress) -> None:
        """Build the writer."""

        def build() -> None:
            self._writer = self._make(progress)

        self._try(build)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Write steps, if the writer works."""
        if (writer := self._writer) is not None:
            self._try(lambda: writer.on_steps(records))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write a held-out loss, if the writer works."""
        if (writer := self._writer) is not None:
            self._try(lambda: writer.on_evaluation(evaluation))

    def close(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._try(self._writer.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever a tracker or a disk raises, training goes on
            if not self._has_warned:
                self._has_warned = True
                told = _WHO.sub("", str(error))  # without the passwords of addresses
                self._say(f"{self._target} cannot be written ({told}): training goes on, with gaps in it or without it")


class LineFile:
    """A text file that grows by whole lines, and survives a full disk, a kill while writing, and a restart.

    What could not be written waits for the next try, so that no line is lost or torn.
    """

    def __init__(self, path: Path) -> None:
        """Wrap a path, which need not exist."""
        self._path = path
        self._waiting: list[str] = []

    def keep(self, is_kept: Callable[[str], bool]) -> bool:
        """Keep the whole lines that `is_kept` accepts; the file is replaced atomically.

        Args:
            is_kept: Of a line, with its end.

        Returns:
            Whether any lines are left.

        Raises:
            OSError: The file cannot be read or replaced; it is as it was.
        """
        if not self._path.exists():
            return False
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and is_kept(line)]
        if kept != lines:
            whole = self._path.with_name(f"{self._path.name}.new")
            whole.write_text("".join(kept), encoding="utf-8")
            whole.replace(self._path)
        return bool(kept)

    def append(self, lines: Iterable[str]) -> None:
        """Append lines and close the file, so that a run that is cut short keeps what it had.

        Args:
            lines: Each with its end.

        Raises:
            OSError: They cannot be written now; the file is as it was, and they are tried again the next time.
        """
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
        """Write what could not be written before.

        Raises:
            OSError: It still cannot be written.
        """
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


class MegatronLog:
    """Writes a line per step in the style of Megatron-LM's log, so that its parsers find their keys."""

    def __init__(
        self,
        folder: Path,
        progress: Progress,
        *,
        train_iters: int,
        batch: int,
        clock: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        """Write `train.log`; drop lines of later steps, and add a line if the run is resumed.

        Args:
            folder: That is there.
            progress: Steps before.
            train_iters: Steps of the whole run.
            batch: Samples of a step.
            clock: Tells the local time.
        """
        self._file = LineFile(folder / LOG_FILE)
        self._train_iters, self._batch, self._clock = train_iters, batch, clock

        def is_kept(line: str) -> bool:
            found = _LOGGED.match(line)
            return found is not None and int(found[1]) <= progress.steps

        if self._file.keep(is_kept) or progress.steps:
            self._file.append([f" > going on after iteration {progress.steps} at {clock():%Y-%m-%d %H:%M:%S}\n"])

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Append a line per step."""
        self._file.append(map(self._step_line, records))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Append a line with the held-out loss."""
        where = f" validation loss at iteration {evaluation.step}"
        values = f"lm loss value: {evaluation.loss:.6E} | lm loss PPL: {evaluation.perplexity:.6E}"
        self._file.append([f"{where} | {values} |\n"])

    def close(self) -> None:
        """Flush the file."""
        self._file.flush()

    def _step_line(self, record: StepRecord) -> str:
        parts = [
            f"[{self._clock():%Y-%m-%d %H:%M:%S}] iteration {record.step:8d}/{self._train_iters:8d}",
            f"consumed samples: {record.samples:12d}",
            f"elapsed time per iteration (ms): {record.step_s * 1000:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {record.tflops:.3g}" if math.isfinite(record.tflops) else "",
            f"learning rate: {record.learning_rate:.6E}",
            f"global batch size: {self._batch:5d}",
            f"lm loss: {record.loss:.6E}",
            f"loss scale: {record.loss_scale:.1f}",
            f"grad norm: {record.grad_norm:.3f}",
            f"num zeros: {record.num_zeros_in_grad:.1f}" if math.isfinite(record.num_zeros_in_grad) else "",
            f"params norm: {record.params_norm:.3f}" if math.isfinite(record.params_norm) else "",
            f"number of skipped iterations: {int(record.is_skipped):3d}",
            f"number of nan iterations: {int(not math.isfinite(record.loss)):3d}",
        ]
        return f" {' | '.join(filter(None, parts))} |\n"


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
        """Log scalars by name, for some steps."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        self.log([(record.step, step_scalars(record)) for record in records])

    def on_evaluation(self, evaluation: Evaluation) -> None:
        values = {"lm loss validation": evaluation.loss, "lm loss validation ppl": evaluation.perplexity}
        self.log([(evaluation.step, values)])


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
        metrics = [
            self._metric(name, value, now_ms, step) for step, scalars in values for name, value in scalars.items()
        ]
        for first in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MLFLOW_BATCH])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
