"""The records of a run: its settings, every step and evaluation, in files and in trackers."""

from __future__ import annotations

import json
import math
import re
import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_fsdp.config.ddp_config_flags import off_flag_of
from megatron_fsdp.errors import words_of
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.console import Display, Say
from megatron_fsdp.train.data.tokens import TokenData
from megatron_fsdp.train.measure import FIGURES, Evaluation, Progress, Speed, StepRecord, Writer
from megatron_fsdp.train.options import DDP_FIELDS, OPTIONS, Options, flag_for
from megatron_fsdp.train.options.job import BatchPlan, Job
from megatron_fsdp.train.ranks import Rank

APPLIED_FILE = "applied.json"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
WANDB_ID_FILE = "wandb_id.txt"
_WANDB_STEP = "iteration"
_LINE_EVERY_S = 5.0
_WHO = re.compile(r"(?<=://)[^/?#\s\"'<>]*@")

Measured = TypeVar("Measured", StepRecord, Evaluation)


# ---- the settings of a run ------------------------------------------------------------------------------------------


def applied(job: Job) -> dict[str, Any]:
    """Return the whole run as plain values: every option with its value and origin, and its resolution."""
    return {
        "version": __version__,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # "DEFAULT", "AVX2", "AVX512": it decides bits, too
        "options": {name: plain(job.options.value(name)) for name in (*OPTIONS, *DDP_FIELDS)},
        "origins": dict(job.options.origins),
        "engine": job.engine,
        "ddp": job.ddp.to_dict(),
        "sizes": asdict(job.sizes),
        "batch": {**asdict(job.batch), "microbatches": job.batch.microbatches, "filled": job.batch.filled},
        "dtype": plain(job.dtype),
        "schedule": asdict(job.schedule),
        "train_iters": job.train_iters,
        "seq_length": job.seq_length,
        "notices": list(job.notes),
    }


def header_rows(job: Job, rank: Rank, data: TokenData, folder: Path, speed: Speed) -> list[tuple[str, str]]:
    """Return the lines of the header: decisions, given options with their origins, and warnings."""
    said = dict[str, list[str]]()
    for name, origin in job.options.origins.items():
        said.setdefault(origin, []).append(_spelled(job.options, name))
    flops = "" if math.isnan(speed.flops) else f" and {speed.flops / 1e12:.3g} TFLOP"
    peak = "MFU not shown: the peak of this device is unknown; give --peak-tflops"
    if not math.isnan(speed.peak_tflops):
        peak = f"{speed.peak_tflops:.3g} TFLOP/s per rank"
    cut = " x ".join(f"{name} {size}" for name, size in asdict(job.sizes).items() if size > 1 or name == "data")
    return [
        ("engine", engine_words(job)),
        ("ranks", f"{rank.count} on {rank.device.type}" + ("" if job.sizes.is_data_only else f": {cut}")),
        ("batch", _batch_words(job.batch)),
        ("dtypes", ", ".join(f"{what} {dtype}" for what, dtype in job.dtypes.items())),
        ("text", str(job.options.data.data_path or "source of the Python standard library")),
        ("tokens", f"{data.training.count:,} to train on, {data.held_out.count:,} held out"),
        ("steps", f"{job.train_iters:,} of {job.tokens_per_step:,} tokens{flops}"),
        ("peak", peak),
        ("results", str(folder)),
        *(("options", f"{' '.join(words)} ({origin})") for origin, words in said.items()),
        *(("note", note) for note in (*job.notes, *data.notes)),
    ]


def engine_words(job: Job) -> str:
    """Describe the engine and its strategy."""
    if job.engine == "torch_fsdp2":
        return "torch FSDP2"
    if job.engine == "ddp":
        return "ddp, buckets" + (", distributed optimizer" if job.ddp.use_distributed_optimizer else "")
    outer = job.ddp.outer_dp_sharding_strategy
    across = "" if outer == "no_shard" else f", {outer} across"
    of_experts = job.ddp.data_parallel_sharding_strategy_experts
    apart = f", experts {of_experts}" if of_experts is not None else ""
    return f"{job.engine}, {job.ddp.data_parallel_sharding_strategy}{across}{apart}"


def _spelled(options: Options, name: str) -> str:
    flag, value = flag_for(name), options.value(name)
    if value is True:
        return flag
    if value is False:
        return (OPTIONS[name].off_flags or (f"{flag} off",))[0] if name in OPTIONS else off_flag_of(DDP_FIELDS[name])
    return shlex.join([flag, *map(_word, value if isinstance(value, tuple) else [value])])


def _batch_words(batch: BatchPlan) -> str:
    """Return the arithmetic of the batch, such as `global 8 = 2 ranks x 1 microbatch x 4`."""
    ranks = "1 rank" if batch.ranks == 1 else f"{batch.ranks} ranks"
    microbatches = "1 microbatch" if batch.microbatches == 1 else f"{batch.microbatches} microbatches"
    filled = f" - {batch.filled} that only fill up" if batch.filled else ""
    return f"global {batch.total} = {ranks} x {microbatches} x {batch.micro}{filled}"


def _word(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).removeprefix("torch.")


# ---- lines of JSON --------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value that strict JSON can hold: numbers that are not finite become None, and unknown objects text."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str) or value is None else _word(value)


def to_json(value: object, indent: int | None = None) -> str:
    """Return a value, made plain, as JSON."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def to_line(measured: StepRecord | Evaluation) -> str:
    """Return one line of JSON, with its end."""
    return to_json(asdict(measured)) + "\n"


def from_line(line: str, cls: type[Measured]) -> Measured | None:
    """Parse a line of `to_line`, with NaN for null; None if the line is torn or something else."""
    try:
        found = json.loads(line)
        names = [field.name for field in fields(cls) if field.name in found]
        values: dict[str, Any] = {name: math.nan if found[name] is None else found[name] for name in names}
        return cls(**values) if line.endswith("\n") and isinstance(values.get("step"), int) else None
    except (ValueError, TypeError):
        return None


def read_lines(path: Path, cls: type[Measured]) -> list[Measured]:
    """Read the whole lines of a file; empty if there is no file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = [from_line(line, cls) for line in text.splitlines(keepends=True)]
    return [measured for measured in found if measured is not None]


# ---- writers --------------------------------------------------------------------------------------------------------


def find_writers(job: Job, folder: Path, config: Mapping[str, Any], say: Say) -> dict[str, Writer]:
    """Return the writers of a run by their names in messages; trackers get its options as `config`, no secrets."""
    asked = job.options.reporting
    writers: dict[str, Writer] = {METRICS_FILE: JsonLines(folder)}
    if asked.tensorboard_dir is not None:
        writers["TensorBoard"] = _TensorBoard(asked.tensorboard_dir)
    if asked.wandb_project is not None:
        named = {"project": asked.wandb_project, "name": asked.wandb_exp_name, "config": dict(config)}
        writers["W&B"] = _Wandb(folder, named)
    every_s = 0.0 if job.options.is_given("log_interval") else _LINE_EVERY_S
    return {**writers, "the display": Display(say, job.train_iters, job.limit_s, every_s)}


class JsonLines(Writer):
    """Writes steps and evaluations as lines of JSON; every step is there once, however often a run restarts."""

    def __init__(self, folder: Path) -> None:
        """Write two files into an existing folder."""
        self._steps, self._evaluations = folder / METRICS_FILE, folder / EVALUATIONS_FILE

    def start(self, progress: Progress) -> None:
        """Drop later steps, and a line torn by a kill; files are replaced atomically."""
        for path, kept in (
            (self._steps, read_lines(self._steps, StepRecord)),
            (self._evaluations, read_lines(self._evaluations, Evaluation)),
        ):
            if path.exists():
                new = path.with_name(f"{path.name}.new")
                new.write_text("".join(to_line(each) for each in kept if each.step <= progress.steps), encoding="utf-8")
                new.replace(path)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Append steps."""
        with self._steps.open("a", encoding="utf-8") as file:
            file.writelines(map(to_line, records))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation."""
        with self._evaluations.open("a", encoding="utf-8") as file:
            file.write(to_line(evaluation))


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return a step's scalars for trackers, by Megatron-LM's names where it has them; unknown ones are left out."""
    values = {figure.tracker_name: figure.of(record) for figure in FIGURES}
    return {name: value for name, value in values.items() if value is not None}


class _Tracker(Writer):
    """A writer of scalars; `start` imports its package only when it is requested."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step by name."""
        raise NotImplementedError

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.log(record.step, step_scalars(record))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        scalars = {"lm loss validation": evaluation.loss, "lm loss validation ppl": evaluation.perplexity}
        self.log(evaluation.step, scalars)


class _TensorBoard(_Tracker):
    """Writes event files through `torch.utils.tensorboard`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, progress: Progress) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        make: Any = SummaryWriter
        # TensorBoard itself hides the later steps of an earlier run.
        self._writer = make(log_dir=str(self._folder), purge_step=progress.steps + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
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

    def __init__(self, folder: Path, named: Mapping[str, Any]) -> None:
        self._folder, self._named = folder, named
        self._run: Any = None

    def start(self, progress: Progress) -> None:  # noqa: ARG002  # the run goes on where it was
        import wandb

        path = self._folder / WANDB_ID_FILE
        if not path.exists():
            path.write_text(uuid.uuid4().hex, encoding="utf-8")
        library: Any = wandb
        name = path.read_text(encoding="utf-8").strip()
        self._run = library.init(**self._named, dir=str(self._folder), id=name, resume="allow", save_code=False)
        self._run.define_metric(_WANDB_STEP)
        self._run.define_metric("*", step_metric=_WANDB_STEP)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, _WANDB_STEP: step})

    def close(self) -> None:
        self._run.finish()


class Recorder(Writer):
    """Passes measurements on to writers; their errors never end the run."""

    def __init__(self, say: Say, writers: Mapping[str, Writer] | None = None) -> None:
        """Write by `writers`, which only the first rank has."""
        self.say = say
        self._writers = dict(writers or {})
        self._failed: set[str] = set()

    def start(self, progress: Progress) -> None:
        """Start the writers; one that fails is dropped."""
        self._call_writers("start", progress)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Pass on steps."""
        self._call_writers("on_steps", records)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Pass on a held-out loss."""
        self._call_writers("on_evaluation", evaluation)

    def close(self) -> None:
        """Close the writers."""
        self._call_writers("close")

    def _call_writers(self, method: str, *args: object) -> None:
        """Call a method of each writer, and report its error once."""
        for name, writer in list(self._writers.items()):
            try:
                getattr(writer, method)(*args)
            except Exception as error:  # noqa: BLE001  # whatever a tracker or a disk raises, training goes on
                if method == "start":
                    del self._writers[name]
                if name not in self._failed:
                    self._failed.add(name)
                    reason = _WHO.sub("", words_of(error))  # without the passwords of addresses
                    self.say(f"{name} cannot be written ({reason}): training goes on, with gaps in it or without it")
