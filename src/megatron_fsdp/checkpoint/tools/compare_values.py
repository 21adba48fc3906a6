"""Two pieces of tensors against each other: how many elements differ, and where first. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.shards import Box

BLOCK = 1 << 18


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal.

    Attributes:
        rtol: |a - b| <= atol + rtol * |b| is equal; of two NaN too.
        atol: As rtol. Both 0: equal values; -0.0 equals 0.0.
        bitwise: Equal bits; rtol and atol must be 0.
    """

    rtol: float = 0.0
    atol: float = 0.0
    bitwise: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.rtol < math.inf and 0 <= self.atol < math.inf):
            raise ConfigurationError(f"--rtol {self.rtol} and --atol {self.atol} must be numbers from 0 up")
        if self.bitwise and (self.rtol or self.atol):
            raise ConfigurationError("--bitwise allows no difference at all; leave out --rtol and --atol, or --bitwise")


@dataclass(frozen=True)
class ValueDifference:
    """How two tensors of one shape and dtype differ.

    Attributes:
        count: Elements that differ.
        index: Of the first of them, in order of the flattened tensor.
        values: There, of both sides.
        largest: Largest |a - b| over differing elements that are finite on both sides; 0 where there are none.
    """

    count: int
    index: tuple[int, ...]
    values: tuple[object, object]
    largest: float


def compare_piece(a: torch.Tensor, b: torch.Tensor, box: Box, tolerance: Tolerance) -> ValueDifference | None:
    """Compare the values of one box.

    Args:
        a: Shaped as the box.
        b: As a, and of its dtype.
        box: Where they lie in the global tensor.
        tolerance: What counts as equal.
    """
    a, b = a.reshape(-1), b.reshape(-1)
    if torch.equal(_bytes(a), _bytes(b)):  # equal in every sense, NaN included
        return None
    count, first, largest = 0, None, 0.0
    for start in range(0, a.numel(), BLOCK):
        left, right = a[start : start + BLOCK], b[start : start + BLOCK]
        differs = _differing(left, right, tolerance)
        found = int(differs.sum())
        if not found:
            continue
        count += found
        first = start + int(differs.to(torch.uint8).argmax()) if first is None else first
        gaps = (_wide(left[differs]) - _wide(right[differs])).abs()
        gaps = gaps[gaps.isfinite()]
        largest = max(largest, float(gaps.max()) if gaps.numel() else 0.0)
    if first is None:
        return None
    return ValueDifference(count, _index(first, box), (a[first].item(), b[first].item()), largest)


def merge(a: ValueDifference | None, b: ValueDifference | None) -> ValueDifference | None:
    """Both together; the first place of the two."""
    if a is None or b is None:
        return a or b
    first = min(a, b, key=lambda found: found.index)
    return ValueDifference(a.count + b.count, first.index, first.values, max(a.largest, b.largest))


def _differing(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    if tolerance.bitwise:
        return _other_bits(a, b)
    if tolerance.rtol or tolerance.atol:
        return ~torch.isclose(_wide(a), _wide(b), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return _other_bits(a, b)
    a, b = _wide(a), _wide(b)
    return (a != b) & ~(a.isnan() & b.isnan())


def _other_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    differs = _bytes(a) != _bytes(b)
    return differs.any(-1)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Shape (elements, bytes of one)."""
    values = values.resolve_conj().resolve_neg().contiguous()
    return values.view(torch.uint8).view(values.numel(), values.element_size())


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.dtype.is_complex else torch.float64)


def _index(place: int, box: Box) -> tuple[int, ...]:
    """A place in the flattened box as an index of the global tensor."""
    found = []
    for offset, length in zip(reversed(box.offsets), reversed(box.lengths), strict=True):
        place, here = divmod(place, length)
        found.append(offset + here)
    return tuple(reversed(found))
