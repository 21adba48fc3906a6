"""What engines share that run a model microbatch by microbatch, forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_fsdp.train.data.batches import Batch
from megatron_fsdp.train.engines.stepping import SteppedModel, seed_dropout, to_device


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each token in float32, [samples, length]; logits [samples, length, vocabulary] of any dtype."""
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view_as(targets)


class MicrobatchModel(SteppedModel):
    """A model over ranks that takes one microbatch at a time; see `Trained`."""

    model: nn.Module

    @abstractmethod
    def _microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a microbatch."""

    def accumulate(self, batches: Sequence[Batch], factors: Sequence[Tensor]) -> Tensor:
        """See `Trained`."""
        weight = self._loss_weight
        total = torch.zeros((), device=self.device)
        for i, (batch, factor) in enumerate(zip(batches, factors, strict=True)):
            seed_dropout(batch, self._place.cut.index)
            with self._microbatch(i == len(batches) - 1):
                part = self._place.cut.take(to_device(factor, self.device))
                loss = (self._losses(batch) * part).sum()
                (loss * weight).backward()
            total += loss.detach()
        return self._place.cut.add_up(total)

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """See `Trained`."""
        return self._place.cut.join(self._losses(batch))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """See `Trained`; context-parallel ranks have no whole logits."""
        if self._place.cut.size > 1:
            return None
        return self._place.call(self.model, tokens.to(self.device), None)

    def _losses(self, batch: Batch) -> Tensor:
        """Loss of each token that this rank has, [samples, length / context-parallel ranks]."""
        place = self._place
        samples, length = batch.inputs.shape
        positions = place.cut.positions(samples, length, self.device)
        logits = place.call(self.model, place.cut.take(to_device(batch.inputs, self.device)), positions)
        return token_losses(logits, place.cut.take(to_device(batch.targets, self.device)))
