"""Ratios that name their cause (pure)."""

import math

from torch import Tensor

_NEAR = 2e-3
_NEAR_UPDATE = 2e-2  # weight decay is part of an update, and no correction scales it


def ratio_of(expected: Tensor, found: Tensor) -> float | None:
    """The number r for which `found` is nearest to r times `expected`; None where that is nothing but zeros."""
    want, got = expected.double().flatten(), found.double().flatten()
    square = float(want @ want)
    return float(want @ got) / square if square > 0 else None


def known_ratios(num_ranks: int, microbatches: int) -> tuple[tuple[float, str], ...]:
    """Ratios and what they are; one number may have several names."""
    n, k = num_ranks, microbatches
    found: list[tuple[float, str]] = [(2.0, "2"), (0.5, "1/2")]
    doubled, halved = (f", or {word} (three ranks would tell)" if n == 2 else "" for word in ("doubled", "halved"))
    if n > 1:
        found += [
            (n, f"the number of ranks, {n}: summed over ranks where the mean is wanted{doubled}"),
            (1 / n, f"1/{n}, one over the number of ranks: divided by it once too often{halved}"),
            (math.sqrt(n), f"sqrt({n}), the square root of the number of ranks"),
            (1 / math.sqrt(n), f"1/sqrt({n}), one over the square root of the number of ranks"),
            (n * n, f"the square of the number of ranks, {n}"),
        ]
    if k > 1:
        found += [
            (k, f"the number of microbatches, {k}: the loss is not divided by it"),
            (1 / k, f"1/{k}, one over the number of microbatches: divided by it once too often"),
        ]
    if n > 1 and k > 1:
        found += [(n * k, f"ranks times microbatches, {n} x {k}")]
    return tuple(found)


def is_known(ratio: float | None, num_ranks: int, microbatches: int) -> bool:
    """Whether a ratio names its cause."""
    known = (-1.0, *(value for value, _ in known_ratios(num_ranks, microbatches)))
    return ratio is not None and any(_is_near(ratio, value) for value in known)


def tell_ratio(ratio: float, num_ranks: int, microbatches: int) -> str:
    """A ratio in words.

    Returns:
        Such as `2 times what it should be (the number of ranks, 2: summed over ranks where the mean is wanted)`.
    """
    if math.isclose(ratio, -1.0, rel_tol=_NEAR):
        return "the negative of what it should be: the sign is flipped"
    near = [(value, name) for value, name in known_ratios(num_ranks, microbatches) if _is_near(ratio, value)]
    names = [name for _, name in near if name not in ("2", "1/2")]
    number = f"{near[0][0] if near else ratio:.5g}"
    if number == "1":  # off by less than these digits show
        number = f"1 {'+' if ratio > 1 else '-'} {abs(ratio - 1):.2g}"
    shown = f"{number} times what it should be"
    return f"{shown} ({'; or '.join(names)})" if names else shown


def adam_ratio(step: int, counted: int, betas: tuple[float, float]) -> float:
    """The ratio of Adam's updates when step `step` is corrected as if it were step `counted`.

    Kingma and Ba, "Adam", algorithm 1: the update is proportional to sqrt(1 - beta2^t) / (1 - beta1^t).
    """
    beta1, beta2 = betas

    def correction(t: int) -> float:
        return math.sqrt(1 - beta2**t) / (1 - beta1**t)

    return correction(counted) / correction(step)


def tell_adam_ratio(ratio: float, step: int, betas: tuple[float, float] | None) -> str | None:
    """Words for an update that Adam has corrected with another step's number; None where it is not that."""
    if betas is None:
        return None
    for counted in (step + 1, step - 1):
        if counted > 0 and math.isclose(ratio, adam_ratio(step, counted, betas), rel_tol=_NEAR_UPDATE):
            return f"the step counter is off by one: Adam's bias correction is that of step {counted} in step {step}"
    return None


def _is_near(ratio: float, value: float) -> bool:
    return math.isclose(ratio, value, rel_tol=_NEAR)
