"""Tells whether two tensors differ by more than rounding, and which known fault explains the difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FEW = 8
"""Up to this many elements may have one wrong factor by chance."""
_BY_DTYPE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_GROWTH = 4.0
"""Growth of the tolerance from one update to the next."""
_FLOOR = 0.1
"""Of the tolerance, for the largest element of the whole gradient: see `Tolerance.among`."""
_NEAR_RATIO = 2e-3


@dataclass(frozen=True)
class Tolerance:
    """|found - expected| <= part * (|expected| + largest |expected| of the tensor) + floor + extra.

    Attributes:
        part: Of the element, and of the largest element of its tensor.
        floor: Whatever the tensor.
    """

    part: float
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
        """Return the allowed difference of each element, in float64.

        Args:
            expected: What one process has.
            extra: More that is allowed, element by element.
        """
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


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a tensor that differs.

    Attributes:
        kind: For programs: non-finite, missing, unexpected, shape, zero, frozen, stale, not reduced, factor, moved,
            counter, rounded, ranks disagree or unknown.
        words: For people; follows the name of the tensor in a sentence.
        ratio: Found over expected, where that is one number.
    """

    kind: str
    words: str
    ratio: float | None = None


@dataclass(frozen=True)
class Context:
    """What else is known of a tensor; all tensors are whole and of its shape.

    Attributes:
        num_ranks: Data-parallel ranks.
        microbatches: Per step.
        what: "gradient", "weight", "update" or "value".
        of_ranks: Its gradient from each rank's samples alone.
        stale: Its value with the weights before the last update; None: not known.
        stale_words: What that is, in words.
    """

    num_ranks: int
    microbatches: int = 1
    what: str = "gradient"
    of_ranks: tuple[Tensor, ...] = ()
    stale: Tensor | None = None
    stale_words: str = ""

    def part(self, piece: slice) -> Context:
        """Return the context of some elements of the flattened tensor."""
        return replace(
            self,
            of_ranks=tuple(value.flatten()[piece] for value in self.of_ranks),
            stale=None if self.stale is None else self.stale.flatten()[piece],
        )


Explain = Callable[[Tensor, Tensor, Context, float], Diagnosis | None]
"""(expected, found, context, slack) -> the cause, if it is this one; both in float64."""


def diagnose(expected: Tensor | None, found: Tensor | None, context: Context, tolerance: Tolerance) -> Diagnosis:
    """Diagnose a tensor that differs.

    Args:
        expected: What one process has; None where it has none.
        found: What the sharded run has; None where it has none.
        context: What else is known.
        tolerance: The differences that do not count.

    Returns:
        The first explanation that fits; causes that need an exact match are tried before ratios.
    """
    if found is None:
        return Diagnosis("missing", f"is missing (None): one process has a {context.what}")
    if expected is None:
        return Diagnosis("unexpected", f"is there, where one process has no {context.what} (None)")
    if expected.shape != found.shape:
        words = f"has the shape {tuple(found.shape)} where one process has {tuple(expected.shape)}"
        return Diagnosis("shape", words)
    want, got = expected.double(), found.double()
    finite = want.abs().nan_to_num(nan=0.0, posinf=0.0)
    # One number for all elements, so that pieces and multiples of the tensor can be compared with it too.
    slack = 2 * tolerance.part * float(finite.max() if finite.numel() else 0.0) + tolerance.floor
    for explain in (*_EXPLANATIONS, _explain_part):
        diagnosis = explain(want, got, context, slack)
        if diagnosis is not None:
            return diagnosis
    norms = float(want.norm()), float(got.norm())
    ratio = norms[1] / norms[0] if norms[0] else math.inf
    cosine = float(want.flatten() @ got.flatten()) / (norms[0] * norms[1]) if all(norms) else 0.0
    return Diagnosis("unknown", f"fits no simple cause (norm {ratio:.4g} times what it should be, cosine {cosine:.4g})")


def tell_ratio(ratio: float, num_ranks: int, microbatches: int) -> str:
    """Describe a ratio in words.

    Returns:
        Such as `2 times what it should be (the number of ranks, 2: summed over ranks where the mean is wanted)`.
    """
    if math.isclose(ratio, -1.0, rel_tol=_NEAR_RATIO):
        return "the negative of what it should be: the sign is flipped"
    known = _known_ratios(num_ranks, microbatches).items()
    near = [(value, name) for value, name in known if math.isclose(ratio, value, rel_tol=_NEAR_RATIO)]
    number = f"{near[0][0] if near else ratio:.5g}"
    if number == "1":  # off by less than these digits show
        number = f"1 {'+' if ratio > 1 else '-'} {abs(ratio - 1):.2g}"
    names = "; or ".join(name for _, name in near if name)
    return f"{number} times what it should be" + (f" ({names})" if names else "")


def _known_ratios(num_ranks: int, microbatches: int) -> dict[float, str]:
    """Return the ratios that name their cause."""
    n, k = num_ranks, microbatches
    found = {2.0: "", 0.5: ""}
    if k > 1:
        found[float(k)] = f"the number of microbatches, {k}: the loss is not divided by it"
        found[1 / k] = f"1/{k}, one over the number of microbatches: divided by it once too often"
    if n > 1:
        doubled, halved = (f", or {word} (three ranks would tell)" if n == 2 else "" for word in ("doubled", "halved"))
        ranks = {
            float(n): f"the number of ranks, {n}: summed over ranks where the mean is wanted{doubled}",
            1 / n: f"1/{n}, one over the number of ranks: divided by it once too often{halved}",
            math.sqrt(n): f"sqrt({n}), the square root of the number of ranks",
            1 / math.sqrt(n): f"1/sqrt({n}), one over the square root of the number of ranks",
        }
        for value, name in ranks.items():
            found[value] = "; or ".join(filter(None, (name, found.get(value))))
    return found


# ---- explanations ----------------------------------------------------------------------------------------------------


def _near(expected: Tensor, found: Tensor, slack: float) -> Tensor:
    """Return which elements agree; NaN agrees with nothing."""
    return ((found - expected).abs() <= slack) | (found == expected)


def _same(expected: Tensor, found: Tensor, slack: float) -> bool:
    return expected.shape == found.shape and bool(_near(expected.double(), found, slack).all())


def _explain_values(expected: Tensor, found: Tensor, _context: Context, _slack: float) -> Diagnosis | None:
    bad = ~found.isfinite() & expected.isfinite()
    if bool(bad.any()):
        what = "NaN" if bool(found.isnan().any()) else "infinite"
        return Diagnosis("non-finite", f"is {what} in {int(bad.sum())} of {bad.numel()} elements")
    if bool(expected.any()) and not bool(found.any()):
        return Diagnosis("zero", "is zero", 0.0)
    return None


def _explain_stale(_expected: Tensor, found: Tensor, context: Context, slack: float) -> Diagnosis | None:
    if context.stale is None or not _same(context.stale, found, slack):
        return None
    return Diagnosis("stale", f"is stale by one step: it is {context.stale_words}")


def _explain_not_reduced(expected: Tensor, found: Tensor, context: Context, slack: float) -> Diagnosis | None:
    """Explain a gradient of one rank's samples only: everywhere, or of each rank in its own shard."""
    n = len(context.of_ranks)
    if n < 2:
        return None
    of_ranks = torch.stack(context.of_ranks).double()
    for scale, divided in ((1.0, ""), (1.0 / n, f", divided by {n}")):
        agrees = torch.stack([_near(value * scale, found, slack) for value in of_ranks])
        for rank in range(n):
            if bool(agrees[rank].all()):
                words = f"is not reduced over ranks: it equals the gradient of rank {rank}'s samples alone{divided}"
                return Diagnosis("not reduced", words)
        if found.numel() > FEW and bool(agrees.any(0).all()):
            words = f"is not reduced over ranks: each piece equals the gradient of one rank's samples alone{divided}"
            return Diagnosis("not reduced", words)
    for rank in range(n):
        if _same(expected - of_ranks[rank] / n, found, slack):
            return Diagnosis("not reduced", f"lacks the gradient of rank {rank}'s samples: it is not in the sum")
    return None


def _explain_factor(expected: Tensor, found: Tensor, context: Context, slack: float) -> Diagnosis | None:
    """Explain a multiple of the right tensor; with few elements, only a ratio that names its cause counts."""
    known = (-1.0, *_known_ratios(context.num_ranks, context.microbatches))
    return _factor_among(known if expected.numel() <= FEW else (*known, None), expected, found, context, slack)


def _explain_factor_of_few(expected: Tensor, found: Tensor, context: Context, slack: float) -> Diagnosis | None:
    return _factor_among((None,), expected, found, context, slack)


def _factor_among(
    ratios: Iterable[float | None], expected: Tensor, found: Tensor, context: Context, slack: float
) -> Diagnosis | None:
    """Return the first ratio that fits; None among them stands for the best fit."""
    want, got = expected.flatten(), found.flatten()
    square = float(want @ want)
    fitted = float(want @ got) / square if square > 0 else 0.0
    if fitted == 0.0 or abs(fitted - 1) * float(want.abs().max()) <= slack:
        return None
    for each in ratios:
        ratio = fitted if each is None else each
        if _same(want * ratio, got, slack * max(1.0, abs(ratio))):
            told = tell_ratio(ratio, context.num_ranks, context.microbatches)
            if not expected.dim():
                told = f"{float(found):.7g} where one process has {float(expected):.7g}: {told}"
            return Diagnosis("factor", f"is {told}", ratio)
    return None


def _explain_moved(expected: Tensor, found: Tensor, _context: Context, slack: float) -> Diagnosis | None:
    if expected.dim() == 2 and _same(expected.t().reshape(expected.shape), found, slack):
        return Diagnosis("moved", "is transposed")
    first, last = _stretch(expected, found, slack)
    if last - first < 2 or not _same(expected.flatten().sort().values, found.flatten().sort().values, slack):
        return None
    words = f"has the right elements in other places, from element {first} to {last - 1} of {expected.numel()}"
    width = expected[0].numel() if expected.dim() > 1 else 1
    if width > 1:
        words += f" (rows {first // width} to {(last - 1) // width} of {len(expected)})"
    return Diagnosis("moved", words)


def _explain_rounded(expected: Tensor, found: Tensor, context: Context, _slack: float) -> Diagnosis | None:
    """Explain elements that are off by no more than the rounding of a coarser dtype, and some by 1/16 of it.

    A gradient is a sum of the terms of n ranks. Each is off by eps / 2 of the largest, the sum of the first k of them
    by k times that, and so is their mean: eps / 2 * (1 + (2 + ... + n) / n + 1) in all. A kept value has to be one that
    the dtype can hold.
    """
    error = (found - expected).abs()
    size = torch.stack([expected.abs(), *(value.double().abs() for value in context.of_ranks)]).amax(0)
    times = (len(context.of_ranks) + 5) / 4 if context.of_ranks else 1.0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):  # the finest that explains it is the likeliest
        info = torch.finfo(dtype)
        is_small = bool((error <= times * info.eps * (size + info.smallest_normal)).all())
        is_shown = bool((error >= info.eps / 16 * size).any())
        if is_small and is_shown and (context.what == "gradient" or torch.equal(found.to(dtype).double(), found)):
            where = "communicated or kept in a coarser dtype"
            if dtype is torch.float32:
                where = "kept in float32 by main_params_dtype, as fully_shard does unless told, or communicated in it"
            name = str(dtype).removeprefix("torch.")
            return Diagnosis("rounded", f"is right, but rounded as {name} would ({where})")
    return None


_EXPLANATIONS: tuple[Explain, ...] = (
    _explain_values,
    _explain_stale,
    _explain_not_reduced,
    _explain_factor,
    _explain_moved,
    _explain_rounded,
    _explain_factor_of_few,
)


def _explain_part(expected: Tensor, found: Tensor, context: Context, slack: float) -> Diagnosis | None:
    """Explain the stretch of elements that differ, where the rest is right."""
    want, got = expected.flatten(), found.flatten()
    first, last = _stretch(want, got, slack)
    if not 2 <= last - first < len(want):
        return None
    piece = slice(first, last)
    for explain in _EXPLANATIONS:
        told = explain(want[piece], got[piece], context.part(piece), slack)
        if told is not None:
            words = f"is right but for elements {first}..{last - 1} of {len(want)}; that piece {told.words}"
            return replace(told, words=words)
    return None


def _stretch(expected: Tensor, found: Tensor, slack: float) -> tuple[int, int]:
    """Return the first element that differs and the one behind the last; 0, 0 where none does."""
    places = (~_near(expected, found, slack)).flatten().nonzero().flatten()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
