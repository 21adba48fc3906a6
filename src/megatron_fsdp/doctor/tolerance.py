"""How far two right runs may be apart: sums in another order round differently (pure)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_BY_DTYPE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_GROWTH = 4.0
"""By how much rounding is let grow from one update to the next."""
_FLOOR = 0.1
"""Of the tolerance, for the largest element of the whole gradient: see `Tolerance.among`."""


@dataclass(frozen=True)
class Tolerance:
    """|found - expected| <= part * (|expected| + largest |expected| of the tensor) + floor + extra.

    Attributes:
        part: Of the element, and of the largest element of its tensor.
        floor: Whatever the tensor.
    """

    part: float
    floor: float = 0.0

    def at_step(self, step: int) -> "Tolerance":
        """What is allowed in a step, counted from 1: four times as much after every update."""
        growth = _GROWTH ** (step - 1)
        return Tolerance(self.part * growth, self.floor * growth)

    def among(self, values: Iterable[Tensor | None]) -> "Tolerance":
        """With a floor from the largest element of all gradients of a backward pass: a tenth of the tolerance of it.

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
        """The allowed difference of each element, in float64.

        Args:
            expected: What one process has.
            extra: More that is allowed, element by element.
        """
        size = expected.double().abs()
        largest = size.max() if size.numel() else size.sum()
        allowed = self.part * (size + largest) + self.floor
        return allowed if extra is None else allowed + extra

    def differing(self, expected: Tensor, found: Tensor, extra: Tensor | None = None) -> Tensor:
        """Which elements differ; NaN agrees with NaN only."""
        want, got = expected.double(), found.double()
        is_near = (got - want).abs() <= self.allowed(want, extra)
        return ~(is_near | (got == want) | (got.isnan() & want.isnan()))

    def agrees(self, expected: Tensor, found: Tensor, extra: Tensor | None = None) -> bool:
        """Whether shapes are equal and no element differs."""
        return expected.shape == found.shape and not bool(self.differing(expected, found, extra).any())

    def agree_numbers(self, expected: float, found: float) -> bool:
        """Whether two numbers agree."""
        return self.agrees(torch.tensor(expected, dtype=torch.float64), torch.tensor(found, dtype=torch.float64))


EXACT = Tolerance(0.0)


@dataclass(frozen=True)
class Nearness:
    """The same with the slack of one tensor, so that pieces and multiples of it can be compared too.

    Attributes:
        part: Of the element.
        slack: Whatever the element.
    """

    part: float
    slack: float

    @classmethod
    def around(cls, expected: Tensor, tolerance: Tolerance) -> "Nearness":
        """What `tolerance` allows for the elements of a tensor."""
        finite = expected.double().abs().nan_to_num(nan=0.0, posinf=0.0)
        largest = float(finite.max()) if finite.numel() else 0.0
        return cls(tolerance.part, tolerance.part * largest + tolerance.floor)

    def scaled(self, ratio: float) -> "Nearness":
        """For the same tensor times a number."""
        return Nearness(self.part, self.slack * max(1.0, abs(ratio)))

    def differing(self, expected: Tensor, found: Tensor) -> Tensor:
        """Which elements differ; NaN differs from everything."""
        want, got = expected.double(), found.double()
        return ~(((got - want).abs() <= self.part * want.abs() + self.slack) | (got == want))

    def same(self, expected: Tensor, found: Tensor) -> bool:
        """Whether no element differs."""
        return expected.shape == found.shape and not bool(self.differing(expected, found).any())


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """The tolerance of the coarsest dtype: float64 1e-10, float32 1e-5, float16 5e-3, bfloat16 3e-2.

    float32: sums of some thousands of terms in another order, each rounded to 6e-8. The 16-bit dtypes: a few units in
    the last place (1e-3 and 8e-3) of the largest element.
    """
    return Tolerance(max((_BY_DTYPE.get(dtype, 0.0) for dtype in dtypes), default=0.0) or _BY_DTYPE[torch.float32])
