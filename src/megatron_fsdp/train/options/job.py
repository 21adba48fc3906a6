"""A run, completed and checked: its ranks, batches and text, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.precision import MixedPrecisionPolicy, ResolvedPrecision, resolve_precision
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.options import Options

EngineName = Literal["megatron_fsdp", "ddp", "torch_fsdp2"]


@dataclass(frozen=True)
class World:
    """The ranks and hardware of a run, and how often its ranks were started again."""

    ranks: int
    device_type: str
    restarts: int = 0


@dataclass(frozen=True)
class Sizes:
    """Ranks of each kind of parallelism; their product is the number of ranks, experts lie across data ranks."""

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
    """How the `total` samples of a step are cut into microbatches of `micro` on data-parallel ranks.

    A remainder is filled up, so that a step has the same samples on any number of ranks.
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
    """Plan `--micro-batch-size` and `--global-batch-size` for a number of data-parallel ranks."""
    total = micro * ranks if total is None else total
    if total < micro:
        raise ConfigurationError(
            f"--global-batch-size {total} is less than --micro-batch-size {micro}: give a microbatch that fits in"
        )
    return BatchPlan(micro, total, ranks)


@dataclass(frozen=True)
class Split:
    """Shares of a text, which add up to 1: to train on, to hold out, and for a later test, which is not read."""

    training: float
    held_out: float
    aside: float = 0.0


def parse_split(text: str) -> Split:
    """Parse `--split`: two or three numbers, in any unit."""
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
class Schedule:
    """How the learning rate rises and falls."""

    peak: float  # largest rate
    final: float  # rate at the end of the decay
    style: str
    warmup_steps: float  # fewer than `decay_steps`; said in samples, perhaps no whole number
    decay_steps: float
    wsd_steps: float = 0  # of the linear fall at the end
    initial: float = 0.0  # rate that the warmup rises from

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step` (0-based).

        Rises linearly and reaches the peak in the last step of the warmup, so that the first step has a rate above 0.
        Falls so that the last step of the decay has the final rate: along half a cosine (Loshchilov and Hutter 2017),
        a line, or the inverse root of the step (Vaswani et al. 2017); WSD stays at the peak and falls at the end (Hu et
        al. 2024).
        """
        if step + 1 <= self.warmup_steps:
            return self.initial + (self.peak - self.initial) * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if step + 1 >= self.decay_steps:
            return self.final
        if self.style == "inverse-square-root":
            start = max(1, self.warmup_steps)
            return max(self.final, self.peak * math.sqrt(start / max(start, step + 1)))
        return self.final + (self.peak - self.final) * self._share_left(step)

    def _share_left(self, step: int) -> float:
        """Return the fraction of the way from the final rate up to the peak."""
        if self.style == "WSD":
            return min(1.0, (self.decay_steps - step - 1) / self.wsd_steps) if self.wsd_steps else 1.0
        fallen = (step - self.warmup_steps + 1) / (self.decay_steps - self.warmup_steps)
        return 1.0 - fallen if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * fallen))


@dataclass(frozen=True)
class Job:
    """A complete, checked description of a run."""

    options: Options
    engine: EngineName
    ddp: DistributedDataParallelConfig
    sizes: Sizes
    batch: BatchPlan
    dtype: torch.dtype
    schedule: Schedule
    train_iters: int
    seq_length: int
    load_is_optional: bool  # there may be nothing to load yet
    notices: tuple[str, ...]
    restarts: int = 0

    @property
    def limit_s(self) -> float:
        """Seconds of training after which the run ends."""
        minutes = self.options.training.exit_duration_in_mins
        return math.inf if minutes is None else 60.0 * minutes

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
    def dtypes(self) -> dict[str, str]:
        """The names of the dtypes that decide rounding, by what has them."""
        found = self.precision
        dtypes = {
            "compute": found.compute,
            "main weights": found.main_params,
            "main gradients": found.main_grads,
            "gradient communication": found.grad_comm,
        }
        return {what: str(dtype).removeprefix("torch.") for what, dtype in dtypes.items()}

    @property
    def fsdp2_reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 reduces gradients."""
        return torch.bfloat16 if self.options.training.grad_reduce_in_bf16 else torch.float32
