"""The training loop: plain steps over samples whose order does not depend on the number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.comm.agreement import decided_by_first
from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.train.data.batches import Batch, Feed
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.evaluation import evaluate
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.recovery.faults import NanGuard
from megatron_fsdp.train.recovery.hangs import Pulse
from megatron_fsdp.train.reporting.measure import ExposedCommunication, peak_bytes
from megatron_fsdp.train.reporting.metrics import Evaluation, Speed, StepRecord


class Watcher(Protocol):
    """The interface for showing progress; only the first rank's shows anything."""

    def start(self, progress: Progress) -> None:
        """Begin, or resume after the steps of `progress`."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Show the steps since the last call."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Show a held-out loss."""

    def say(self, text: str) -> None:
        """Print one or more lines."""


class Keeper(Protocol):
    """The interface for checkpoints; every method is called by all ranks."""

    is_interrupted: bool
    """Whether this rank was asked to save and end."""

    def start(self) -> Progress:
        """Load a checkpoint if there is one, and return how far it is."""

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step."""

    def save(self, progress: Progress) -> None:
        """Save a checkpoint."""


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
    """The result of training besides the weights.

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
    """The result of one step, the same on all ranks.

    Attributes:
        loss: Over all ranks and microbatches, nats per token.
        grad_norm: Norm of the whole gradient before clipping.
        checksum: Of the samples of all ranks; see `Batch`.
        is_interrupted: Whether some rank was asked to end.
        is_late: Whether the time limit is reached by the first rank's clock.
        params_norm: Norm of all weights after the step; NaN: not asked for.
        num_zeros_in_grad: Elements of the gradients that are zero; NaN: not asked for.
    """

    loss: float
    grad_norm: float
    checksum: int
    is_interrupted: bool
    is_late: bool
    params_norm: float = math.nan
    num_zeros_in_grad: float = math.nan

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are finite, so that the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train(run: Run, watcher: Watcher, keeper: Keeper, lacks: Callable[[int], bool] = lambda _: False) -> Outcome:
    """Train for as many steps as the job allows, from the keeper's progress; report to the watcher.

    Args:
        run: What is trained.
        watcher: Shows progress.
        keeper: Keeps checkpoints.
        lacks: Asked on the first rank: whether the run's files have this step, and no held-out loss after it.
    """
    job, training = run.job, run.job.options.training
    guard = NanGuard(job.options.recovery.max_nan_steps, watcher.say)
    exposed = ExposedCommunication(run.trained, is_wanted=job.options.reporting.log_exposed_communication)
    limit_s = math.inf if training.exit_duration_in_mins is None else 60.0 * training.exit_duration_in_mins
    with run.pulse.resting():
        done = keeper.start()
    watcher.start(done)
    _make_up(run, watcher, done, lacks)
    began_s, records = time.perf_counter() - done.elapsed_s, list[StepRecord]()
    counters, is_interrupted = None, False
    while done.steps < job.train_iters and not training.skip_train:
        run.rank.require_launcher()
        step = done.steps + 1
        run.pulse.beat(step)
        scale = 1.0 if run.trained.scale is None else run.trained.scale.value
        before = None if run.trained.inside is None else run.trained.inside.traffic()
        is_shown = _is_due(step, job.options.reporting.log_interval) or step == job.train_iters
        with exposed.step(is_measured=is_shown):
            result = train_step(run, done, guard, (keeper.is_interrupted, time.perf_counter() - began_s >= limit_s))
        if before is not None and run.trained.inside is not None:
            counters = run.trained.inside.traffic().since(before)
        last_s, now_s = done.elapsed_s, time.perf_counter() - began_s
        done = Progress(step, done.samples + job.batch.total, done.skipped + (not result.is_finite), now_s)
        records.append(_record_of(run, done, result, now_s - last_s, scale))
        is_interrupted = result.is_interrupted
        is_last = is_interrupted or result.is_late or step == job.train_iters or _is_due(step, training.exit_interval)
        is_save, is_check = keeper.is_due(step), _is_due(step, training.eval_interval)
        if is_last or is_check or is_save or is_shown:
            watcher.on_steps(_measured(run, records, exposed.take_share()))
            with run.pulse.resting():
                if is_save or is_last:
                    keeper.save(done)
                if (is_check or is_last) and not is_interrupted:
                    watcher.on_evaluation(Evaluation(step, evaluate(job, run.trained, run.data)))
            began_s, records = time.perf_counter() - done.elapsed_s, []  # evaluations and saves do not count
        if is_last:
            break
    return Outcome(done, counters, is_interrupted)


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def _make_up(run: Run, watcher: Watcher, done: Progress, lacks: Callable[[int], bool]) -> None:
    """Evaluate first if that was due after the last step and the run was ended in between."""
    steps, training = done.steps, run.job.options.training
    is_due = steps > 0 and (_is_due(steps, training.eval_interval) or steps == run.job.train_iters)
    if is_due and not training.skip_train and decided_by_first(lambda: lacks(steps), "reading evaluations"):
        with run.pulse.resting():
            watcher.on_evaluation(Evaluation(steps, evaluate(run.job, run.trained, run.data)))


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
    loss = run.trained.accumulate(batches, _loss_factors(run, batches))
    norm = run.trained.clip(run.job.options.optimizer.clip_grad)
    result = _exchange(run, loss, norm, sum(batch.checksum for batch in batches), flags)
    asked = run.job.options.reporting
    if asked.log_num_zeros_in_grad:
        result = replace(result, num_zeros_in_grad=float(run.trained.count_zero_gradients()))
    guard.judge(done.steps + 1, result.loss, result.grad_norm, run.trained)
    if result.is_finite:
        run.trained.update()
    else:
        run.trained.skip()
    if asked.log_params_norm:
        result = replace(result, params_norm=run.trained.norm_of_parameters())
    return result


def _loss_factors(run: Run, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the weight of each token's loss, so that the sum over all ranks is the loss of the step."""
    training, trained = run.job.options.training, run.trained
    if not training.calculate_per_token_loss:
        return [batch.factors_per_sample(run.job.batch.total) for batch in batches]
    tokens = float(run.job.tokens_per_step)
    if run.job.options.data.eod_mask_loss:  # else every sample counts all its tokens
        total = torch.stack([batch.weights.sum() for batch in batches]).sum().double().to(trained.device)
        dist.all_reduce(total)
        tokens = float(total) * trained.data_size / run.rank.count
    return [batch.factors_per_token(tokens) for batch in batches]


def _exchange(run: Run, loss: Tensor, norm: Tensor, checksum: int, flags: tuple[bool, bool]) -> StepResult:
    """All-reduce the results of a step; waits for the device."""
    interrupted, late = flags
    share = run.trained.data_size / run.rank.count  # ranks of one data-parallel rank have the same loss each
    mine = [float(loss) * share, checksum * share, float(interrupted), float(late and run.rank.is_first)]
    values = torch.tensor(mine, dtype=torch.float64, device=run.trained.device)
    dist.all_reduce(values)
    total, checksums, interrupts, lates = values.tolist()
    whole = round(checksums) if math.isfinite(checksums) else 0
    return StepResult(total, float(norm), whole, interrupts > 0, lates > 0)


def _record_of(run: Run, done: Progress, result: StepResult, step_s: float, scale: float) -> StepRecord:
    """Make the record of a step from what is known as soon as it is done."""
    speed = run.speed or Speed(run.job.tokens_per_step)
    return StepRecord(
        step=done.steps,
        samples=done.samples,
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=run.job.schedule.rate(done.steps - 1),
        skipped=done.skipped,
        data_checksum=result.checksum,
        tokens_per_s=speed.tokens_per_s(step_s),
        step_s=step_s,
        peak_bytes=0,
        elapsed_s=done.elapsed_s,
        tflops=speed.tflops(step_s),
        mfu=speed.mfu(step_s),
        loss_scale=scale,
        params_norm=result.params_norm,
        num_zeros_in_grad=result.num_zeros_in_grad,
    )


def _measured(run: Run, records: Sequence[StepRecord], exposed_share: float) -> list[StepRecord]:
    """Add to records what is measured only when steps are shown (the share to the last one); collective."""
    peak = torch.tensor([float(peak_bytes(run.trained))], dtype=torch.float64, device=run.trained.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    found = [replace(record, peak_bytes=int(peak.item())) for record in records]
    return [*found[:-1], replace(found[-1], exposed_share=exposed_share)]
