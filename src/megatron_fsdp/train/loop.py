"""The training loop: plain steps over samples whose order does not depend on the number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.train.data.batches import Batch, Feed, factors_per_sample, factors_per_token
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.evaluation import evaluate
from megatron_fsdp.train.launch.ranks import Rank, agree
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.recovery.faults import NanGuard
from megatron_fsdp.train.recovery.hangs import Pulse
from megatron_fsdp.train.reporting.exposed import ExposedCommunication
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord
from megatron_fsdp.train.reporting.readings import peak_bytes
from megatron_fsdp.train.reporting.speed import Speed


class Watcher(Protocol):
    """Whoever shows progress; only the first rank has one that shows anything."""

    def start(self, progress: Progress) -> None:
        """Begin, or go on after these steps."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Take the steps since the last call."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take a held-out loss."""

    def say(self, text: str) -> None:
        """Show a line or several."""


class Keeper(Protocol):
    """Whoever keeps checkpoints; every method is called by all ranks."""

    is_interrupted: bool
    """Whether this rank was asked to save and end."""

    def start(self) -> Progress:
        """Load what there is to load, and tell how far it is."""

    def is_due(self, step: int) -> bool:
        """Whether to save after this step."""

    def save(self, progress: Progress) -> None:
        """Save."""


@dataclass(frozen=True)
class Run:
    """Everything the loop works with.

    Attributes:
        job: What was asked for.
        trained: The sharded model and its optimizer.
        data: The tokens.
        feed: This rank's microbatches.
        rank: This process.
        speed: What a step costs; None: only its tokens are known.
        pulse: Its signs of life.
    """

    job: Job
    trained: Trained
    data: TokenData
    feed: Feed
    rank: Rank
    speed: Speed | None = None
    pulse: Pulse = field(default_factory=Pulse)


@dataclass(frozen=True)
class Outcome:
    """What training leaves behind besides the weights.

    Attributes:
        progress: How far it came.
        step_counters: Collectives and bytes of the last step on this rank; None with an engine that does not count.
        is_interrupted: Whether the user ended it.
    """

    progress: Progress
    step_counters: Traffic | None
    is_interrupted: bool


@dataclass(frozen=True)
class StepResult:
    """One step, as all ranks know it.

    Attributes:
        loss: Over all ranks and microbatches, nats per token.
        grad_norm: Norm of the whole gradient before clipping.
        checksum: Of the samples of all ranks; see `Batch`.
        is_interrupted: Whether some rank was asked to end.
        is_late: Whether the first rank's clock says that time is over.
    """

    loss: float
    grad_norm: float
    checksum: int
    is_interrupted: bool
    is_late: bool

    @property
    def is_finite(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class _Pace:
    """Steps that were not shown yet, and the clock."""

    progress: Progress
    started: float = field(default_factory=time.perf_counter)
    results: list[tuple[Progress, StepResult]] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far."""
        return self.progress.elapsed_s + time.perf_counter() - self.started


def train(run: Run, watcher: Watcher, keeper: Keeper, lacks: Callable[[int], bool] = lambda _: False) -> Outcome:
    """Train for as many steps as the job allows, from where the keeper starts; tell the watcher.

    Args:
        run: What is trained.
        watcher: Shows progress.
        keeper: Keeps checkpoints.
        lacks: Asked on the first rank: whether the run's files have this step, and no held-out loss after it.
    """
    job, training = run.job, run.job.options.training
    guard = NanGuard(job.options.recovery.max_nan_steps, watcher.say)
    with run.pulse.resting():
        pace = _Pace(keeper.start())
    watcher.start(pace.progress)
    pace = make_up(run, watcher, pace, lacks)
    exposed = ExposedCommunication(run.trained, is_wanted=job.options.reporting.log_exposed_communication)
    limit_s = math.inf if training.exit_duration_in_mins is None else 60.0 * training.exit_duration_in_mins
    counters, is_interrupted = None, False
    while pace.progress.steps < job.train_iters and not training.skip_train:
        run.rank.require_launcher()
        before = None if run.trained.inside is None else run.trained.inside.traffic()
        last = pace.results[-1][0] if pace.results else pace.progress
        run.pulse.beat(last.steps + 1)
        is_shown = (last.steps + 1) % job.options.reporting.log_interval == 0 or last.steps + 1 == job.train_iters
        with exposed.step(is_measured=is_shown):
            result = train_step(run, last, guard, (keeper.is_interrupted, pace.elapsed_s >= limit_s))
        if before is not None and run.trained.inside is not None:
            counters = run.trained.inside.traffic().since(before)
        now = Progress(
            last.steps + 1, last.samples + job.batch.total, last.skipped + (not result.is_finite), pace.elapsed_s
        )
        pace.results.append((now, result))
        is_interrupted = result.is_interrupted
        is_last = is_interrupted or result.is_late or now.steps == job.train_iters
        is_last = is_last or (training.exit_interval is not None and now.steps % training.exit_interval == 0)
        is_save = keeper.is_due(now.steps)
        is_check = training.eval_interval is not None and now.steps % training.eval_interval == 0
        if is_last or is_check or is_save or is_shown:
            watcher.on_steps(records_of(run, pace, exposed.take_share()))
            with run.pulse.resting():
                if is_save or is_last:
                    keeper.save(now)
                if (is_check or is_last) and not is_interrupted:
                    watcher.on_evaluation(Evaluation(now.steps, evaluate(run.job, run.trained, run.data)))
            pace = _Pace(now)
        if is_last:
            break
    return Outcome(pace.progress, counters, is_interrupted)


def make_up(run: Run, watcher: Watcher, pace: _Pace, lacks: Callable[[int], bool]) -> _Pace:
    """Evaluate first where it was due after the last step and the run was ended in between; the clock begins after."""
    steps, training = pace.progress.steps, run.job.options.training
    is_due = training.eval_interval is not None and steps % training.eval_interval == 0
    if training.skip_train or not steps or not (is_due or steps == run.job.train_iters):
        return pace
    if not agree(run.rank, lambda: lacks(steps)):
        return pace
    with run.pulse.resting():
        watcher.on_evaluation(Evaluation(steps, evaluate(run.job, run.trained, run.data)))
    return _Pace(pace.progress)


def train_step(run: Run, done: Progress, guard: NanGuard, flags: tuple[bool, bool]) -> StepResult:
    """Do the optimizer step after `done`, or skip it if its loss or gradient is not finite.

    Args:
        run: What is trained.
        done: How far it is.
        guard: Counts skipped steps.
        flags: Whether this rank was asked to end, and whether its time is over.

    Raises:
        NonFiniteStepError: Too many steps in a row were not finite; on every rank.
    """
    for group in run.trained.optimizer.param_groups:
        group["lr"] = run.job.schedule.rate(done.steps)
    batches = run.feed.batches(done.samples)
    loss = run.trained.accumulate(batches, loss_factors(run, batches))
    norm = run.trained.clip(run.job.options.optimizer.clip_grad)
    result = exchange(run, loss, norm, sum(batch.checksum for batch in batches), flags)
    guard.judge(done.steps + 1, result.loss, result.grad_norm, run.trained)
    if result.is_finite:
        run.trained.update()
    else:
        run.trained.skip()
    return result


def loss_factors(run: Run, batches: Sequence[Batch]) -> list[Tensor]:
    """What each token's loss counts, so that all ranks' sums add up to the loss of the step."""
    training, trained = run.job.options.training, run.trained
    if not training.calculate_per_token_loss:
        return [factors_per_sample(batch, run.job.batch.total) for batch in batches]
    counted = torch.stack([batch.weights.sum() for batch in batches]).sum().double()
    if run.job.options.data.eod_mask_loss:  # else every sample counts all its tokens
        total = counted.to(trained.device)
        dist.all_reduce(total)
        tokens = float(total) * trained.data_size / run.rank.count
    else:
        tokens = float(run.job.tokens_per_step)
    return [factors_per_token(batch, tokens) for batch in batches]


def exchange(run: Run, loss: Tensor, norm: Tensor, checksum: int, flags: tuple[bool, bool]) -> StepResult:
    """Let all ranks know the same of a step; waits for the device."""
    interrupted, late = flags
    share = run.trained.data_size / run.rank.count  # ranks of one data-parallel rank have the same loss each
    mine = [float(loss) * share, checksum * share, float(interrupted), float(late and run.rank.is_first)]
    values = torch.tensor(mine, dtype=torch.float64, device=run.trained.device)
    dist.all_reduce(values)
    total, checksums, interrupts, lates = values.tolist()
    whole = round(checksums) if math.isfinite(checksums) else 0
    return StepResult(total, float(norm), whole, interrupts > 0, lates > 0)


def records_of(run: Run, pace: _Pace, exposed_share: float = math.nan) -> list[StepRecord]:
    """What is shown of the steps since the last time; all ranks together.

    Args:
        run: What is trained.
        pace: The steps.
        exposed_share: Measured in the last of them.
    """
    job, last = run.job, len(pace.results) - 1
    speed = run.speed or Speed(job.tokens_per_step)
    peak = torch.tensor([float(peak_bytes(run.trained))], dtype=torch.float64, device=run.trained.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    befores = [pace.progress, *(now for now, _ in pace.results)]
    records = []
    for i, (now, result) in enumerate(pace.results):
        step_s = now.elapsed_s - befores[i].elapsed_s
        records.append(
            StepRecord(
                step=now.steps,
                samples=now.samples,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=job.schedule.rate(now.steps - 1),
                skipped=now.skipped,
                data_checksum=result.checksum,
                tokens_per_s=speed.tokens_per_s(step_s),
                step_s=step_s,
                peak_bytes=int(peak.item()),
                loss_scale=1.0 if run.trained.scale is None else run.trained.scale.value,
                elapsed_s=now.elapsed_s,
                tflops=speed.tflops(step_s),
                mfu=speed.mfu(step_s),
                exposed_share=exposed_share if i == last else math.nan,
            )
        )
    return records
