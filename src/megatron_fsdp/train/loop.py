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
class Progress:
    """How far training is, earlier runs included.

    Attributes:
        steps: Steps that were done.
        elapsed_s: Seconds in training steps; evaluations and saves not counted.
    """

    steps: int = 0
    elapsed_s: float = 0.0


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
class Outcome:
    """What training leaves behind besides the weights.

    Attributes:
        progress: How far it came.
        step_counters: Collectives and bytes of the last step on this rank.
        is_interrupted: Whether the user ended it.
    """

    progress: Progress
    step_counters: Traffic
    is_interrupted: bool

    @property
    def steps(self) -> int:
        """Steps that were done, those of earlier runs included."""
        return self.progress.steps

    @property
    def elapsed_s(self) -> float:
        """Seconds in training steps, likewise."""
        return self.progress.elapsed_s


def train(run: Run, watcher: Watcher, keeper: Keeper) -> Outcome:
    """Train for as many steps as the settings allow, from where the keeper starts; tell the watcher."""
    arguments, total = run.settings.arguments, run.settings.preset.steps
    evaluate_at = {total * (i + 1) // arguments.evaluations for i in range(arguments.evaluations)}
    pending: list[tuple[int, Tensor, Tensor]] = []
    progress = keeper.start()
    limit_s = progress.elapsed_s + 60.0 * arguments.minutes
    verdict, started, counters = Verdict(), time.perf_counter(), run.model.traffic()
    for step in range(progress.steps + 1, total + 1):
        run.rank.require_launcher()
        before = run.model.traffic()
        pending.append((step, *train_step(run, step - 1)))
        counters = run.model.traffic().since(before)
        is_last = step == total or (arguments.exit_interval is not None and step % arguments.exit_interval == 0)
        is_check, is_save = step in evaluate_at, keeper.is_due(step)
        if is_last or is_check or is_save or step % arguments.log_every == 0:
            records, verdict = flush(run, pending, (progress.elapsed_s, started), limit_s, keeper.is_interrupted)
            progress = Progress(step, records[-1].elapsed_s)
            watcher.on_steps(records)
            pending = []
            is_last = is_last or verdict.is_over
            if is_save or is_last:
                keeper.save(progress)
            if (is_check or is_last) and not verdict.is_interrupted:
                watcher.on_evaluation(Evaluation(step, evaluate(run, QUICK_SAMPLES)))
            if is_last:
                break
            started = time.perf_counter()
    return Outcome(progress, counters, verdict.is_interrupted)


def train_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Do optimizer step `step` (0-based); return this rank's mean loss and the norm of the whole gradient."""
    preset, arguments = run.settings.preset, run.settings.arguments
    rate = learning_rate(run.settings, step)
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


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate of step `step` (0-based)."""
    preset = settings.preset
    return learning_rate_at(
        step, peak=preset.learning_rate, warmup_steps=preset.warmup, total_steps=settings.decay_steps
    )


@dataclass(frozen=True)
class Verdict:
    """What the ranks have agreed on.

    Attributes:
        is_late: Whether time is over.
        is_interrupted: Whether a rank was asked to save and end.
    """

    is_late: bool = False
    is_interrupted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether to end."""
        return self.is_late or self.is_interrupted


def flush(
    run: Run,
    pending: Sequence[tuple[int, Tensor, Tensor]],
    times_s: tuple[float, float],
    limit_s: float,
    is_interrupted: bool,
) -> tuple[list[StepRecord], Verdict]:
    """Average the losses of some steps over ranks, and agree whether to end.

    Args:
        run: What is trained.
        pending: Step number, this rank's loss and the gradient norm, at least one.
        times_s: Seconds trained before these steps, and the clock (`time.perf_counter`) when they began.
        limit_s: Seconds after which training ends.
        is_interrupted: Whether this rank was asked to end.

    Returns:
        The records, and whether to end.
    """
    before_s, started = times_s
    count = run.rank.count
    losses = reduce_values(run.rank, torch.stack([loss for _, loss, _ in pending]).tolist(), "sum")
    span_s = time.perf_counter() - started  # read after the losses, which waits for the device
    mine = [
        float(peak_bytes(run.model, run.optimizer, run.rank.device)),
        float(before_s + span_s >= limit_s),
        float(is_interrupted),
    ]
    peak, late, interrupted = reduce_values(run.rank, mine, "max")
    records = []
    for i, (step, _, norm) in enumerate(pending):
        speed = run.tokens_per_step * len(pending) / span_s
        elapsed_s = before_s + span_s * (i + 1) / len(pending)
        rate = learning_rate(run.settings, step - 1)
        records.append(StepRecord(step, losses[i] / count, float(norm), rate, speed, int(peak), elapsed_s))
    return records, Verdict(late > 0.0, interrupted > 0.0)


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
