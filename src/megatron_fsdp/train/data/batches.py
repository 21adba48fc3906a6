"""Microbatches of token ids, and what feeds them to the training loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank.

    Attributes:
        inputs: [samples, length] int64 token ids.
        targets: [samples, length] int64, the token after each input.
        weights: [samples, length] float32: 1 where the target is learned, 0 where it is not; all 0 for a sample that
            only fills the microbatch up.
        checksum: Sum over the samples that count of a 32-bit checksum of their tokens; sums over ranks and microbatches
            are the same for any cut of the same samples.
        dropout_seed: What is dropped at random is drawn from this; it depends on the seed of the run and the number of
            the first sample only, so microbatches of one size drop the same on any number of ranks.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    checksum: int = 0
    dropout_seed: int = 0

    @property
    def counts(self) -> Tensor:
        """[samples] float32: how many targets of each sample are learned."""
        return self.weights.sum(dim=1)

    def pin_memory(self) -> Batch:
        """Return the batch in memory that an accelerator reads by itself; called by `DataLoader`."""
        inputs, targets, weights = (tensor.pin_memory() for tensor in (self.inputs, self.targets, self.weights))
        return replace(self, inputs=inputs, targets=targets, weights=weights)


class Feed(Protocol):
    """Gives a rank its microbatches; which samples they hold depends on the seed and the number of the sample only."""

    def batches(self, first_sample: int) -> list[Batch]:
        """Return this rank's microbatches of the step whose first sample, over all steps and ranks, has this number."""

    def close(self) -> None:
        """End workers."""


def factors_per_sample(batch: Batch, total_samples: int) -> Tensor:
    """Return [samples, length] float32 by which token losses add up to the mean over samples of their means."""
    counts = batch.counts[:, None].clamp(min=1.0)
    return batch.weights / counts / total_samples


def factors_per_token(batch: Batch, total_tokens: float) -> Tensor:
    """Return [samples, length] float32 by which token losses add up to the mean over all tokens that count."""
    return batch.weights / max(1.0, total_tokens)
