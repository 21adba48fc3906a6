"""The training loop: plain PyTorch, the same lines as without sharding."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.buffer.collectives import Traffic
from megatron_fsdp.train.arguments import Settings
from megatron_fsdp.train.data import Batch, Share, TokenSets, held_out_batches, training_batch
from megatron_fsdp.train.metrics import Evaluation, StepRecord
from megatron_fsdp.train.model import next_token_loss
from megatron_fsdp.train.ranks import Rank, reduce_values
from megatron_fsdp.train.readings import peak_bytes
from megatron_fsdp.train.schedule import learning_rate_at

QUICK_SAMPLES = 16  # held-out samples of the measurements on the way
FINAL_SAMPLES = 128


class Watcher(Protocol):
    """Whoever shows progress; only the first rank has one that shows anything."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Take the steps since the last call."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take a held-out loss."""


@dataclass(frozen=True)
class Run:
    """Everything the loop works with.

    Attributes:
        model: The sharded model.
        optimizer: Its optimizer.
        settings: What was asked for.
        tokens: The data.
        rank: This process.
    """

    model: MegatronFSDP
    optimizer: torch.optim.Optimizer
    settings: Settings
    tokens: TokenSets
    rank: Rank

    @property
    def share(self) -> Share:
        """This rank's part of every batch."""
        return Share(self.rank.index, self.rank.count, self.settings.preset.batch_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        preset = self.settings.preset
        samples = preset.batch_size * self.rank.count * self.settings.arguments.grad_accumulation
        return samples * preset.sequence_length


@dataclass(frozen=True)
class Outcome:
    """What training leaves behind besides the weights.

    Attributes:
        steps: Steps that were done.
        elapsed_s: Seconds in training steps, evaluations not counted.
        step_counters: Collectives and bytes of the last step on this rank.
    """

    steps: int
    elapsed_s: float
    step_counters: Traffic


def train(run: Run, watcher: Watcher) -> Outcome:
    """Train for as many steps as the settings allow, and tell the watcher."""
    total, limit_s = run.settings.preset.steps, 60.0 * run.settings.arguments.minutes
    evaluations = run.settings.arguments.evaluations
    evaluate_at = {total * (i + 1) // evaluations for i in range(evaluations)}
    pending: list[tuple[int, Tensor, Tensor]] = []
    elapsed_s, started, counters = 0.0, time.perf_counter(), run.model.traffic()
    for step in range(1, total + 1):
        run.rank.require_launcher()
        before = run.model.traffic()
        pending.append((step, *train_step(run, step - 1)))
        counters = run.model.traffic().since(before)
        is_check = step in evaluate_at
        if is_check or step % run.settings.arguments.log_every == 0:
            records, is_over = flush(run, pending, (elapsed_s, started), limit_s)
            elapsed_s = records[-1].elapsed_s
            watcher.on_steps(records)
            pending = []
            if is_check or is_over:
                watcher.on_evaluation(Evaluation(step, evaluate(run, QUICK_SAMPLES)))
            if is_over:
                break
            started = time.perf_counter()
    return Outcome(step, elapsed_s, counters)


def train_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Do optimizer step `step` (0-based); return this rank's mean loss and the norm of the whole gradient."""
    preset, arguments = run.settings.preset, run.settings.arguments
    rate = learning_rate_at(step, peak=preset.learning_rate, warmup_steps=preset.warmup, total_steps=preset.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad()
    losses = []
    for microbatch in range(arguments.grad_accumulation):
        indices = run.share.sample_indices(microbatch)
        batch = training_batch(run.tokens.training, preset.sequence_length, arguments.seed, step, indices)
        logits = run.model(batch.inputs.to(run.rank.device))
        loss = next_token_loss(logits, batch.targets.to(run.rank.device)) / arguments.grad_accumulation
        loss.backward()
        losses.append(loss.detach())
    norm = run.model.clip_grad_norm_(arguments.clip)
    run.optimizer.step()
    return torch.stack(losses).sum(), norm


def flush(
    run: Run, pending: Sequence[tuple[int, Tensor, Tensor]], times_s: tuple[float, float], limit_s: float
) -> tuple[list[StepRecord], bool]:
    """Average the losses of some steps over ranks, and agree whether time is over.

    Args:
        run: What is trained.
        pending: Step number, this rank's loss and the gradient norm, at least one.
        times_s: Seconds trained before these steps, and the clock (`time.perf_counter`) when they began.
        limit_s: Seconds after which training ends.

    Returns:
        The records, and whether to end.
    """
    before_s, started = times_s
    preset, count = run.settings.preset, run.rank.count
    losses = reduce_values(run.rank, torch.stack([loss for _, loss, _ in pending]).tolist(), "sum")
    span_s = time.perf_counter() - started  # read after the losses, which waits for the device
    is_late = float(before_s + span_s >= limit_s)
    peak, over = reduce_values(run.rank, [float(peak_bytes(run.model, run.optimizer, run.rank.device)), is_late], "max")
    records = []
    for i, (step, _, norm) in enumerate(pending):
        rate = learning_rate_at(
            step - 1, peak=preset.learning_rate, warmup_steps=preset.warmup, total_steps=preset.steps
        )
        speed = run.tokens_per_step * len(pending) / span_s
        elapsed_s = before_s + span_s * (i + 1) / len(pending)
        records.append(StepRecord(step, losses[i] / count, float(norm), rate, speed, int(peak), elapsed_s))
    return records, over > 0.0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation without gradients, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def evaluate(run: Run, max_samples: int) -> float:
    """Return the mean loss on at most `max_samples` held-out samples, in nats per token."""
    batches = held_out_batches(run.tokens.held_out, run.settings.preset.sequence_length, max_samples, run.share)
    with evaluating(run.model):
        sums = [weighted_loss(run.model, batch, run.rank.device) for batch in batches]
    total, weight = reduce_values(run.rank, [sum(loss for loss, _ in sums), sum(count for _, count in sums)], "sum")
    return total / weight


def weighted_loss(model: nn.Module, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Return the weighted sum of the samples' mean losses, and the sum of the weights."""
    logits = model(batch.inputs.to(device)).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), batch.targets.to(device), reduction="none")
    weights = batch.weights.to(device)
    return float((losses.mean(dim=1) * weights).sum()), float(weights.sum())
