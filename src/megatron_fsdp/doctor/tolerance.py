"""The tolerance of a parity check: how far rounding may move a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_BY_DTYPE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_GROWTH = 4.0
"""Growth of the tolerance from one update to the next."""
_FLOOR = 0.1
"""Of the tolerance, for the largest element of the whole gradient: see `Tolerance.among`."""


@dataclass(frozen=True)
class Tolerance:
    """|found - expected| <= part * (|expected| + largest |expected| of the tensor) + floor + extra."""

    part: float  # of the element, and of the largest element of its tensor
    floor: float = 0.0

    def at_step(self, step: int) -> Tolerance:
        """Return the tolerance in a step, counted from 1: four times as much after every update."""
        growth = _GROWTH ** (max(step, 1) - 1)
        return Tolerance(self.part * growth, self.floor * growth)

    def among(self, values: Iterable[Tensor | None]) -> Tolerance:
        """Add a floor from the largest element of all gradients of a backward pass: a tenth of the tolerance of it.

        A gradient that is zero in exact arithmetic (of a bias that normalisation or softmax takes off again) is the
        rounding of terms that cancel. It has no size of its own to be relative to; the terms are about as large as
        other gradients of the pass, so rounding is relative to those. The tolerance is some hundred times the rounding
        of one operation (float32: 1e-5 and 6e-8), so a tenth of it leaves room for sums of many terms. What it hides is
        smaller than 1e-6 of the largest element in float32 (5e-4 in float16, 3e-3 in bfloat16): a factor of 2 in a
        tensor 1e-4 times the largest is a hundred times that.
        """
        sizes = [value.double().abs().nan_to_num(0.0, 0.0) for value in values if value is not None and value.numel()]
        return replace(self, floor=self.part * _FLOOR * max((float(size.max()) for size in sizes), default=0.0))

    def allowed(self, expected: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return the allowed difference of each element, in float64; `extra` is added to it."""
        size = expected.double().abs()
        largest = size.max() if size.numel() else size.sum()
        allowed = self.part * (size + largest) + self.floor
        return allowed if extra is None else allowed + extra

    def differing(self, expected: Tensor, found: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return which elements differ; NaN agrees with NaN only."""
        want, got = expected.double(), found.double()
        is_near = (got - want).abs() <= self.allowed(want, extra)
        return ~(is_near | (got == want) | (got.isnan() & want.isnan()))

    def agrees(self, expected: Tensor, found: Tensor, extra: Tensor | None = None) -> bool:
        """Return whether shapes are equal and no element differs."""
        return expected.shape == found.shape and not bool(self.differing(expected, found, extra).any())

    def agree_numbers(self, expected: float, found: float) -> bool:
        """Return whether two numbers agree."""
        return self.agrees(torch.tensor(expected, dtype=torch.float64), torch.tensor(found, dtype=torch.float64))


EXACT = Tolerance(0.0)


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """Return the tolerance of the coarsest dtype: float64 1e-10, float32 1e-5, float16 5e-3, bfloat16 3e-2.

    float32: sums of some thousands of terms in another order, each rounded to 6e-8. The 16-bit dtypes: a few units in
    the last place (1e-3 and 8e-3) of the largest element.
    """
    return Tolerance(max((_BY_DTYPE.get(dtype, 0.0) for dtype in dtypes), default=0.0) or _BY_DTYPE[torch.float32])
