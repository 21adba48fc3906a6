"""A run, completed and checked: what the trainer does, the same on every rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.train.learning_rate import Schedule
from megatron_fsdp.train.options.batch import BatchPlan
from megatron_fsdp.train.options.options import Options

EngineName = Literal["megatron_fsdp", "ddp", "torch_fsdp2"]


@dataclass(frozen=True)
class World:
    """What a run meets.

    Attributes:
        ranks: Processes.
        device_type: Such as `cpu` or `cuda`.
        multiplies_bf16: Whether the hardware multiplies bfloat16.
        restarts: How often the ranks were started again.
        needs_one_connection: Whether the accelerator orders kernels of tensor- and context-parallel ranks well only
            with CUDA_DEVICE_MAX_CONNECTIONS=1, as NVIDIA's before Blackwell.
    """

    ranks: int
    device_type: str
    multiplies_bf16: bool = False
    restarts: int = 0
    needs_one_connection: bool = False


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
        """Whether there is no parallelism but that of the data."""
        return self.tensor == self.pipeline == self.context == self.expert == 1


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
        """Seconds after which a run that stands still is ended."""
        minutes = self.options.recovery.hang_timeout_minutes
        return 60.0 * (self.options.parallel.distributed_timeout_minutes if minutes is None else minutes)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step, without those that only fill up."""
        return self.batch.total * self.seq_length

    @property
    def fsdp2_reduce_dtype(self) -> torch.dtype:
        """What gradients travel in with FSDP2; hardware that does not multiply bfloat16 need not send it."""
        training = self.options.training
        is_spared = training.auto_bf16 and self.dtype == torch.float32
        return torch.bfloat16 if training.grad_reduce_in_bf16 and not is_spared else torch.float32
