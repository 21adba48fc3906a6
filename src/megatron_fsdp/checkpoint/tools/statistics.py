"""Smallest, largest, mean and norm of a stored tensor, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

BLOCK = 1 << 18


@dataclass(frozen=True)
class TensorStatistics:
    """Of one tensor; of complex numbers, of their magnitudes.

    Attributes:
        minimum: Of the finite elements; None where there are none.
        maximum: As minimum.
        mean: As minimum.
        norm: Square root of the sum of squares of the finite elements, computed in float64; None where that is not
            enough for it. The mean likewise.
        non_finite: Elements that are infinite or not a number.
        zeros: Elements that are zero.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float | None
    non_finite: int
    zeros: int


def statistics_of(chunks: Iterable[torch.Tensor]) -> TensorStatistics:
    """Statistics of a tensor that is given in chunks; at most a block of them is widened at a time."""
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    finite_count = non_finite = zeros = 0
    for chunk in chunks:
        flat = chunk.reshape(-1)
        for start in range(0, flat.numel(), BLOCK):
            values = _widened(flat[start : start + BLOCK])
            finite = values[torch.isfinite(values)]
            non_finite += values.numel() - finite.numel()
            zeros += int((values == 0).sum())
            if finite.numel():
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total += float(finite.sum())
                squares += float(finite.square().sum())
                finite_count += finite.numel()
    if not finite_count:
        return TensorStatistics(None, None, None, 0.0, non_finite, zeros)
    mean, norm = _if_finite(total / finite_count), _if_finite(math.sqrt(squares))
    return TensorStatistics(low, high, mean, norm, non_finite, zeros)


def _if_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _widened(values: torch.Tensor) -> torch.Tensor:
    return values.abs().to(torch.float64) if values.dtype.is_complex else values.to(torch.float64)
