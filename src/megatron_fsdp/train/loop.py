"""The training loop: plain steps and evaluations over samples that do not depend on the number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.train.checkpoints import RunCheckpoints
from megatron_fsdp.train.data.tokens import Batch, Feed, TokenData, held_out_batches
from megatron_fsdp.train.failures import NonFiniteStepError, describing_memory_errors, memory_advice
from megatron_fsdp.train.measure import Evaluation, Progress, Speed, StepRecord, peak_bytes, recording_waits
from megatron_fsdp.train.models.trained import Trained
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank, reduce_values
from megatron_fsdp.train.recorder import Recorder

_SHOWN = 5  # parameters with gradients that are not finite


@dataclass(frozen=True)
class Run:
    """The objects of the training loop."""

    job: Job
    trained: Trained
    data: TokenData
    feed: Feed
    rank: Rank
    speed: Speed


def train(run: Run, recorder: Recorder, keeper: RunCheckpoints) -> tuple[Progress, bool]:
    """Train as many steps as the job allows; return the progress, and True if the run was asked to end."""
    job, training, asked = run.job, run.job.options.training, run.job.options.reporting
    guard = NanGuard(job.options.recovery.max_nan_steps, recorder.say)
    done = keeper.start()
    recorder.start(done)
    if keeper.owes_evaluation:
        recorder.on_evaluation(Evaluation(done.steps, evaluate(job, run.trained, run.data)))
    began_s, records = time.perf_counter() - done.elapsed_s, list[StepRecord]()
    is_interrupted = False
    while done.steps < job.train_iters and not training.skip_train:
        run.rank.require_launcher()
        step = done.steps + 1
        is_shown = _is_due(step, asked.log_interval) or step == job.train_iters
        flags = keeper.is_interrupted, time.perf_counter() - began_s >= job.limit_s
        waits = recording_waits(run.trained, is_wanted=is_shown and asked.log_exposed_communication)
        with waits as exposed_share, describing_memory_errors(partial(memory_advice, job, run.rank, step)):
            record, is_interrupted, is_late = train_step(run, done, guard, flags)
        elapsed_s = time.perf_counter() - began_s
        record = run.speed.timed(record, elapsed_s - done.elapsed_s, elapsed_s)
        done = Progress(step, record.samples, record.skipped, record.elapsed_s)
        records.append(record)
        is_last = is_interrupted or is_late or step == job.train_iters or _is_due(step, training.exit_interval)
        is_save = _is_due(step, job.options.checkpoint.save_interval)
        is_check = _is_due(step, training.eval_interval)
        if is_last or is_check or is_save or is_shown:
            (peak,) = reduce_values(run.rank, [float(peak_bytes(run.trained))], "max")
            records = [replace(each, peak_bytes=int(peak)) for each in records]
            records[-1] = replace(records[-1], exposed_share=exposed_share())
            recorder.on_steps(records)
            if (is_check or is_last) and not is_interrupted:  # before the save, so that it is not missed
                recorder.on_evaluation(Evaluation(step, evaluate(job, run.trained, run.data)))
            if is_save or is_last:
                keeper.save(done, owes_evaluation=is_interrupted and (is_check or step == job.train_iters))
            began_s, records = time.perf_counter() - done.elapsed_s, []  # evaluations and saves do not count
        if is_last:
            break
    return done, is_interrupted


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def train_step(run: Run, done: Progress, guard: NanGuard, flags: tuple[bool, bool]) -> tuple[StepRecord, bool, bool]:
    """Run the optimizer step after `done`, or skip it if its loss or gradient is not finite.

    `flags`: whether this rank was asked to end, and whether its time is over. Returns the step, without its times,
    whether any rank was asked to end, and whether the first rank's time is over. The guard ends the run after too many
    steps that are not finite.
    """
    trained, asked, step = run.trained, run.job.options.reporting, done.steps + 1
    rate = run.job.schedule.rate(done.steps)
    for group in trained.optimizer.param_groups:
        group["lr"] = rate
    batches = run.feed.batches(done.samples)
    losses = trained.accumulate(batches, _loss_factors(run, batches)).tolist()
    is_digested, digests = _is_due(step, asked.log_digests_interval), {}
    if is_digested:
        digests["gradients"] = trained.digests_of("gradients")
    grad_norm = float(trained.clip(run.job.options.optimizer.clip_grad))
    share = trained.data_size / run.rank.count  # ranks of one data-parallel rank have the same loss each
    checksum = sum(batch.checksum for batch in batches)
    mine = [math.fsum(losses) * share, checksum * share, float(flags[0]), float(flags[1] and run.rank.is_first)]
    total, checksums, interrupts, lates = reduce_values(run.rank, mine, "sum")
    if trained.is_deterministic:
        total = math.fsum(chain.from_iterable(gather_objects(losses)))  # rounded once, whatever the order
    is_finite = math.isfinite(total) and math.isfinite(grad_norm)
    record = StepRecord(
        step=step,
        samples=done.samples + run.job.batch.total,
        loss=total,
        grad_norm=grad_norm,
        learning_rate=rate,
        skipped=done.skipped + (not is_finite),
        data_checksum=round(checksums) if math.isfinite(checksums) else 0,
        loss_scale=1.0 if trained.scale is None else trained.scale.value,
        num_zeros_in_grad=float(trained.count_zero_gradients()) if asked.log_num_zeros_in_grad else math.nan,
    )
    guard.judge(step, total, grad_norm, trained)
    if is_finite:
        trained.update()
    else:
        trained.skip()
    if asked.log_params_norm:
        record = replace(record, params_norm=trained.norm_of_parameters())
    if is_digested:
        record = replace(record, digests={**digests, "weights": trained.digests_of("weights")})
    return record, interrupts > 0, lates > 0


def _loss_factors(run: Run, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the weight of each token's loss, so that the sum over all ranks is the loss of the step."""
    training, trained = run.job.options.training, run.trained
    if not training.calculate_per_token_loss:
        return [batch.factors_per_sample(run.job.batch.total) for batch in batches]
    tokens = float(run.job.tokens_per_step)
    if run.job.options.data.eod_mask_loss:  # else every sample counts all its tokens
        (total,) = reduce_values(run.rank, [sum(float(batch.weights.sum()) for batch in batches)], "sum")
        tokens = total * trained.data_size / run.rank.count
    return [batch.factors_per_token(tokens) for batch in batches]


def evaluate(job: Job, trained: Trained, data: TokenData, times: int = 1) -> float:
    """Return the mean loss over `times` `--eval-iters` global batches of held-out text, in nats per token; collective.

    It is the same for any number of ranks.
    """
    samples = times * job.options.training.eval_iters * job.batch.total
    batches = held_out_batches(data, job.seq_length, samples, job.batch, trained.data_index)
    found, was_training = [], trained.model.training
    trained.model.eval()
    for batch in batches:
        weights = batch.weights.to(trained.device)
        found.append(torch.stack([(trained.token_losses(batch) * weights).sum(), weights.sum()]))
    trained.model.train(was_training)
    # Ranks that share a batch count it alike, above and below the line. Exact sums are the same in any order.
    everyone = torch.tensor(gather_objects(torch.stack(found).tolist())).flatten(0, 1)
    total, count = (math.fsum(column) for column in everyone.T.tolist())
    return total / count


class NanGuard:
    """Counts consecutive steps that are not finite. Every rank judges the same numbers."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        """Allow `limit` of them in a row; `say` prints each."""
        self._limit = limit
        self._say = say
        self._in_a_row = 0

    def judge(self, step: int, loss: float, grad_norm: float, trained: Trained) -> None:
        """Judge a step whose gradients still exist; collective.

        An overflow of the loss scale alone is no failure.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return
        if trained.scale is not None and trained.scale.has_overflowed(loss, grad_norm):
            scale = f"{trained.scale.value:,.0f}"
            self._say(f"step {step}: gradients overflow float16 at loss scale {scale}: skipped, halved")
            return
        self._in_a_row += 1
        what = f"step {step} has loss {loss} and gradient norm {grad_norm}{nonfinite_gradients(trained.model)}"
        if self._in_a_row > self._limit:
            raise NonFiniteStepError(
                f"{what}: {self._in_a_row} steps in a row could not be taken, and --max-nan-steps is {self._limit}; "
                "lower --lr, look at the data of these steps, or go on from an earlier checkpoint"
            )
        self._say(f"{what}: skipped, {self._in_a_row} of at most {self._limit} in a row")


def nonfinite_gradients(model: nn.Module) -> str:
    """Return the parameters with gradients that are not finite, and their ranks; the same on every rank, collective."""
    bad = []
    for name, parameter in model.named_parameters():
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if isinstance(local, Tensor) and not bool(local.isfinite().all()):
            bad.append(name)
    ranks: dict[str, list[str]] = {}
    for rank, names in enumerate(gather_objects(bad)):
        for name in names:
            ranks.setdefault(name, []).append(str(rank))
    if not ranks:
        return ""
    named = [f"{name} (rank {', '.join(having)})" for name, having in list(ranks.items())[:_SHOWN]]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"; not finite are the gradients of {', '.join(named)}{more}"
