"""A run, completed and checked: its ranks, batches and text, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.precision import MixedPrecisionPolicy, ResolvedPrecision, resolve_precision
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.learning_rate import Schedule
from megatron_fsdp.train.options.options import Options

EngineName = Literal["megatron_fsdp", "ddp", "torch_fsdp2"]


@dataclass(frozen=True)
class World:
    """The ranks and hardware of a run.

    Attributes:
        ranks: Processes.
        device_type: Such as `cpu` or `cuda`.
        multiplies_bf16: Whether the hardware multiplies bfloat16.
        restarts: How often the ranks were started again.
    """

    ranks: int
    device_type: str
    multiplies_bf16: bool = False
    restarts: int = 0


@dataclass(frozen=True)
class Sizes:
    """Ranks of each kind of parallelism; their product is the number of ranks, experts lie across data ranks.

    Attributes:
        data: Data-parallel ranks.
        tensor: Ranks that a matrix is cut over.
        pipeline: Ranks that layers are shared out to.
        context: Ranks that a sequence is cut over.
        expert: Ranks that experts are shared out to.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def is_data_only(self) -> bool:
        """Whether there is only data parallelism."""
        return self.tensor == self.pipeline == self.context == self.expert == 1


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of a step, the same for any number of ranks, are cut into microbatches; a remainder is filled up.

    Attributes:
        micro: Samples per rank and microbatch.
        total: Samples of a step.
        ranks: Data-parallel ranks.
    """

    micro: int
    total: int
    ranks: int

    @property
    def microbatches(self) -> int:
        """Microbatches of each rank."""
        return -(-self.total // (self.micro * self.ranks))

    @property
    def filled(self) -> int:
        """Samples over all ranks that only fill up microbatches."""
        return self.microbatches * self.micro * self.ranks - self.total

    def notices(self) -> tuple[str, ...]:
        """List notices about the plan."""
        if not self.filled:
            return ()
        told = (
            f"{self.filled} of {self.total + self.filled} samples of a step only fill up, and do not count: "
            f"--global-batch-size {self.total} is no multiple of --micro-batch-size {self.micro} x {self.ranks} "
            "data-parallel ranks"
        )
        return (told,)

    def place(self, rank: int, microbatch: int) -> int:
        """Return the place, within the step's samples, at which a rank's microbatch begins."""
        return (microbatch * self.ranks + rank) * self.micro

    def positions(self, rank: int, microbatch: int) -> tuple[int | None, ...]:
        """Return the places, within the step's samples, of a rank's microbatch; None fills up."""
        start = self.place(rank, microbatch)
        return tuple(place if place < self.total else None for place in range(start, start + self.micro))


def plan_batch(micro: int, total: int | None, ranks: int) -> BatchPlan:
    """Plan `--micro-batch-size` and `--global-batch-size` for a number of data-parallel ranks.

    Raises:
        ConfigurationError: A size is not 1 or more, or a microbatch is larger than the whole.
    """
    total = micro * ranks if total is None else total
    if total < micro:
        raise ConfigurationError(
            f"--global-batch-size {total} is less than --micro-batch-size {micro}: give a microbatch that fits in"
        )
    return BatchPlan(micro, total, ranks)


@dataclass(frozen=True)
class Split:
    """Shares of a text, which add up to 1.

    Attributes:
        training: To train on.
        held_out: To evaluate on.
        aside: For a later test; not read.
    """

    training: float
    held_out: float
    aside: float = 0.0


def parse_split(text: str) -> Split:
    """Parse `--split`: two or three numbers, in any unit.

    Raises:
        ConfigurationError: They are not numbers, or leave nothing to train on or to hold out.
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    total = sum(parts)
    is_possible = len(parts) in (2, 3) and all(part >= 0 for part in parts) and 0 < total < math.inf
    if not is_possible or min(part / total for part in parts[:2]) <= 0:
        raise ConfigurationError(
            f"invalid --split {text}: give two numbers above 0, to train on and to hold out, such as 95,5, and "
            "a third for what is left aside, if you like"
        )
    return Split(parts[0] / total, parts[1] / total, (parts[2] if len(parts) == 3 else 0.0) / total)


@dataclass(frozen=True)
class Job:
    """A complete, checked description of a run.

    Attributes:
        options: What was said.
        engine: What shards the model.
        ddp: How, completed; for the engines of this package.
        sizes: Ranks of each kind.
        batch: How samples are cut.
        dtype: What the model computes in.
        schedule: The learning rate.
        train_iters: Optimizer steps in all.
        seq_length: Tokens of a sample.
        load_is_optional: Whether there may be nothing to load yet.
        notices: What was adjusted, and what has no effect, in words.
        restarts: How often the ranks were started again.
    """

    options: Options
    engine: EngineName
    ddp: DistributedDataParallelConfig
    sizes: Sizes
    batch: BatchPlan
    dtype: torch.dtype
    schedule: Schedule
    train_iters: int
    seq_length: int
    load_is_optional: bool
    notices: tuple[str, ...]
    restarts: int = 0

    @property
    def hang_timeout_s(self) -> float:
        """Seconds after which a hanging run is ended."""
        minutes = self.options.recovery.hang_timeout_minutes
        return 60.0 * (self.options.parallel.distributed_timeout_minutes if minutes is None else minutes)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step, without those that only fill up."""
        return self.batch.total * self.seq_length

    @property
    def precision(self) -> ResolvedPrecision:
        """The dtypes of weights and gradients, whichever engine is used."""
        if self.engine == "torch_fsdp2":
            policy = MixedPrecisionPolicy(torch.float32, torch.float32, self.fsdp2_reduce_dtype)
        elif self.ddp.grad_reduce_in_fp32:
            policy = MixedPrecisionPolicy(self.ddp.megatron_fsdp_main_params_dtype, torch.float32, torch.float32)
        else:
            policy = MixedPrecisionPolicy(
                self.ddp.megatron_fsdp_main_params_dtype,
                self.ddp.megatron_fsdp_main_grads_dtype,
                self.ddp.megatron_fsdp_grad_comm_dtype,
            )
        return resolve_precision(policy, self.dtype)

    @property
    def fsdp2_reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 reduces gradients; hardware without bfloat16 products uses float32."""
        training = self.options.training
        is_spared = training.auto_bf16 and self.dtype == torch.float32
        return torch.bfloat16 if training.grad_reduce_in_bf16 and not is_spared else torch.float32
