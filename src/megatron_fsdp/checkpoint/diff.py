"""Compares two checkpoints; one chunk of each side is in memory at a time, however each is sharded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder, ObjectEntry, TensorEntry
from megatron_fsdp.checkpoint.inspect import (
    BLOCK,
    COMMON_FILE,
    as_json,
    compiled,
    dtype_name,
    natural_order,
    read_common_file,
)
from megatron_fsdp.checkpoint.naming import alike
from megatron_fsdp.checkpoint.safe_read import read_file
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box


@dataclass(frozen=True)
class Tolerance:
    """The differences that count as equal."""

    rtol: float = 0.0  # |a - b| <= atol + rtol * |b| is equal; of two NaN too
    atol: float = 0.0  # both 0: equal values; -0.0 equals 0.0
    bitwise: bool = False  # equal bits; rtol and atol must be 0

    def __post_init__(self) -> None:
        if not (0 <= self.rtol < math.inf and 0 <= self.atol < math.inf):
            raise ConfigurationError(f"--rtol {self.rtol} and --atol {self.atol} must be numbers from 0 up")
        if self.bitwise and (self.rtol or self.atol):
            raise ConfigurationError("--bitwise allows no difference at all; leave out --rtol and --atol, or --bitwise")


@dataclass(frozen=True)
class ValueDifference:
    """How two tensors of one shape and dtype differ: in how many elements, where first and by what values.

    `largest` is the largest |a - b| over differing elements that are finite on both sides; 0 where there are none.
    """

    count: int
    index: tuple[int, ...]
    values: tuple[object, object]
    largest: float


@dataclass(frozen=True)
class Difference:
    """What differs about one key, in words.

    `kind` is `only in A`, `only in B`, `type` (tensor and object), `dtype`, `shape`, `values` or `object`.
    """

    key: str
    kind: str
    told: str
    values: ValueDifference | None = None


@dataclass(frozen=True)
class DiffReport:
    """How many keys were compared, and what differs: `common.pt` first, then in the natural order of keys."""

    compared: int
    differences: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `values` only for differences of values."""
        told = [
            {key: as_json(value) for key, value in asdict(item).items() if value is not None}
            for item in self.differences
        ]
        return {"same": self.is_same, "compared": self.compared, "differences": told}


def diff(
    a: CheckpointFolder, b: CheckpointFolder, tolerance: Tolerance | None = None, pattern: str | None = None
) -> DiffReport:
    """Compare all tensors and objects by value, and `common.pt` (the common state of `torch_dist`) too."""
    wanted = compiled(pattern)
    everything = {*a.tensors, *a.objects, *b.tensors, *b.objects}
    keys = natural_order(key for key in everything if wanted.search(key))
    found = [_key_difference(a, b, key, tolerance or Tolerance()) for key in keys]
    if wanted.search(COMMON_FILE) and any((side.path / COMMON_FILE).exists() for side in (a, b)):
        found.insert(0, _common_difference(a, b))
    differences = tuple(item for item in found if item is not None)
    return DiffReport(len(found) - sum(item.kind.startswith("only") for item in differences), differences)


def _common_difference(a: CheckpointFolder, b: CheckpointFolder) -> Difference | None:
    """Compare the `common.pt` files; at least one side has one."""
    left, right = a.path / COMMON_FILE, b.path / COMMON_FILE
    if not (left.exists() and right.exists()):
        side = "A" if left.exists() else "B"
        told = f"file with iteration, arguments and parameter groups that only {side} has"
        return Difference(COMMON_FILE, f"only in {side}", told)
    try:
        found = _sizes_in_words(read_file(left), read_file(right))
    except OSError as error:
        raise CheckpointError(f"{COMMON_FILE} cannot be read: {error.strerror}") from error
    if found is None or alike(read_common_file(a), read_common_file(b)):
        return None
    return Difference(COMMON_FILE, "object", found)


def _key_difference(a: CheckpointFolder, b: CheckpointFolder, key: str, tolerance: Tolerance) -> Difference | None:
    left, right = (side.tensors.get(key) or side.objects.get(key) for side in (a, b))
    if left is None or right is None:
        side = "A" if right is None else "B"
        return Difference(key, f"only in {side}", f"{_in_words(left or right)} that only {side} has")
    both = f"{_in_words(left)} in A, {_in_words(right)} in B"
    if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
        if left.shape != right.shape or left.dtype != right.dtype:
            return Difference(key, "shape" if left.shape != right.shape else "dtype", both)
        values = tensor_difference(a, b, key, tolerance)
        return None if values is None else Difference(key, "values", _values_in_words(values, left.numel), values)
    if type(left) is not type(right):
        return Difference(key, "type", both)
    told = _sizes_in_words(a.read_bytes(key), b.read_bytes(key))
    if told is None or alike(a.read_object(key), b.read_object(key)):
        return None
    return Difference(key, "object", told)


def _sizes_in_words(left: bytes, right: bytes) -> str | None:
    """Describe the bytes of two objects; None if they are equal. Equal objects may have different bytes."""
    return None if left == right else f"object of {len(left)} bytes in A, and other {len(right)} bytes in B"


def _in_words(entry: TensorEntry | ObjectEntry | None) -> str:
    if isinstance(entry, TensorEntry):
        return f"tensor {tuple(entry.shape)} {dtype_name(entry.dtype)}"
    return "object"


def tensor_difference(
    a: CheckpointFolder, b: CheckpointFolder, key: str, tolerance: Tolerance
) -> ValueDifference | None:
    """Compare the values of a tensor, which has one shape and dtype on both sides, chunk by chunk of `a`."""
    found: ValueDifference | None = None
    for box, values in a.parts(key):
        found = _merged(found, compare_piece(values, b.read_box(key, box.offsets, box.lengths), box, tolerance))
        del values  # before the next one is read
    return found


def _values_in_words(found: ValueDifference, numel: int) -> str:
    place = f"[{', '.join(map(str, found.index))}]" if found.index else "the only element"
    left, right = found.values
    return (
        f"{found.count} of {numel} elements differ, first at {place}: {left!r} in A, {right!r} in B; "
        f"by {found.largest:.3g} at most"
    )


# ---- values of tensors -----------------------------------------------------------------------------------------------


def compare_piece(a: torch.Tensor, b: torch.Tensor, box: Box, tolerance: Tolerance) -> ValueDifference | None:
    """Compare the values of one box."""
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
    index = tuple(int(n) + at for n, at in zip(np.unravel_index(first, box.lengths), box.offsets, strict=True))
    return ValueDifference(count, index, (a[first].item(), b[first].item()), largest)


def _merged(a: ValueDifference | None, b: ValueDifference | None) -> ValueDifference | None:
    """Merge the differences of two boxes; keeps the first place of the two."""
    if a is None or b is None:
        return a or b
    first = min(a, b, key=lambda found: found.index)
    return ValueDifference(a.count + b.count, first.index, first.values, max(a.largest, b.largest))


def _differing(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    if tolerance.bitwise or not (a.dtype.is_floating_point or a.dtype.is_complex or tolerance.rtol or tolerance.atol):
        return (_bytes(a) != _bytes(b)).any(-1)
    return ~torch.isclose(_wide(a), _wide(b), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View values as (elements, bytes of one)."""
    values = values.resolve_conj().resolve_neg().contiguous().view(-1)
    return values.view(torch.uint8).view(values.numel(), values.element_size())


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.dtype.is_complex else torch.float64)
