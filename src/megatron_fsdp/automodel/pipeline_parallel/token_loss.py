"""The loss of a microbatch such that the microbatches of a step add up to the mean over all counted labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

IGNORED = -100
"""Label of positions that do not count, as transformers and torch have it."""


def shift(labels: Tensor) -> Tensor:
    """Labels of the next position, (rows, sequence): what logits of the same position are compared with.

    Args:
        labels: As transformers takes them, not yet shifted, (rows, sequence).
    """
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies in float32 over the counted labels.

    Args:
        logits: (rows, sequence, vocabulary).
        labels: Of the same positions, (rows, sequence).
    """
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class MicrobatchLoss:
    """What a schedule calls for the loss of a microbatch: a function of logits and labels, times a factor of the step.

    With the factor dp_size / (label tokens of all data-parallel ranks) the gradients of a step, averaged over the
    data-parallel ranks, are those of the mean over all label tokens, however unevenly these lie over microbatches and
    ranks. A mean of means would be another number.

    Args:
        loss_fn: (logits, labels of the same positions) -> scalar; None: `cross_entropy_sum`.
    """

    def __init__(self, loss_fn: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        self._loss_fn = loss_fn or cross_entropy_sum
        self.factor: Tensor | float | None = None
        """Of the step under way; None: no labels were given, the loss is zero."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The share of a microbatch in the loss of the step, a scalar."""
        if self.factor is None:
            return torch.zeros((), device=logits.device)
        return self._loss_fn(logits, labels) * self.factor
