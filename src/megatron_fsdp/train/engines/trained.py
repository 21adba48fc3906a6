"""What the training loop asks of a model that is sharded and of its optimizer, whichever engine shards it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.engines.loss_scale import LossScale


class Trained(Protocol):
    """A model over ranks and its optimizer. Every method is called by all ranks together.

    Attributes:
        optimizer: Of the model's parameters; its groups take the learning rate.
        device: Where this rank computes.
        data_index: Which data-parallel rank this is; ranks that share it (tensor, pipeline, context) get equal batches.
        data_size: Data-parallel ranks.
        vocab_size: Token ids that the model knows, rounding up included.
        scale: Of the loss, in float16; None in other dtypes. Part of a checkpoint.
    """

    optimizer: torch.optim.Optimizer
    device: torch.device
    data_index: int
    data_size: int
    vocab_size: int
    scale: LossScale | None

    @property
    def model(self) -> nn.Module:
        """What checkpoints and `describe` take."""

    @property
    def inside(self) -> DistributedDataParallel | None:
        """The wrapper of this package, which knows memory, traffic and phases; None with another engine."""

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """Forward and backward of all microbatches of a step, and the reduction of gradients.

        Args:
            batches: This rank's microbatches, on the CPU.
            factors: For each, [samples, length] float32: the loss of the step is the sum over all data-parallel ranks
                and microbatches of factor times loss of the token, and gradients are those of this sum.

        Returns:
            This rank's share of the loss, float32, no gradient; shares of data-parallel ranks add up to the loss.
        """

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients to at most this norm (0: only measure); return the norm before, the same on all ranks."""

    def update(self) -> None:
        """Step the optimizer and drop the gradients; the scale of the loss may grow."""

    def skip(self) -> None:
        """Drop the gradients; the scale of the loss shrinks."""

    def token_losses(self, batch: Batch) -> Tensor:
        """Return [samples, length] float32 losses without gradients, the same on ranks that share the batch."""

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return [1, length, vocabulary] for token ids [1, length], without gradients; None where it cannot."""
