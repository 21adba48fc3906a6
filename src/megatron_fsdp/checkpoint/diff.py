"""Compare two checkpoints; one chunk of each side is in memory at a time, however each is sharded."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from megatron_fsdp.checkpoint.archive import load_object
from megatron_fsdp.checkpoint.folder import CheckpointFolder, ObjectEntry, TensorEntry
from megatron_fsdp.checkpoint.inspect import (
    BLOCK,
    COMMON_FILE,
    as_json,
    compiled,
    dtype_name,
    natural_order,
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
    """The difference of two tensors of one shape and dtype: the number of elements, and the first place and its values.

    `largest` is the largest |a - b| over differing elements that are finite on both sides; 0 without any.
    """

    count: int
    index: tuple[int, ...]
    values: tuple[object, object]
    largest: float


@dataclass(frozen=True)
class Difference:
    """The difference of one key, described by a sentence.

    `kind` is `only in A`, `only in B`, `type` (tensor and object), `dtype`, `shape`, `values` or `object`.
    """

    key: str
    kind: str
    text: str
    values: ValueDifference | None = None


@dataclass(frozen=True)
class DiffReport:
    """The number of compared keys, and the differences: `common.pt` first, then in the natural order of keys."""

    compared: int
    differences: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """True if there is no difference."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `values` only for differences of values."""
        differences = [
            {key: as_json(value) for key, value in asdict(item).items() if value is not None}
            for item in self.differences
        ]
        return {"same": self.is_same, "compared": self.compared, "differences": differences}


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
        what = "file with iteration, arguments and parameter groups"
        return _one_sided(COMMON_FILE, what, "A" if left.exists() else "B")
    try:
        return _object_difference(COMMON_FILE, read_file(left), read_file(right))
    except OSError as error:
        raise CheckpointError(f"{COMMON_FILE} cannot be read: {error.strerror}") from error


def _key_difference(a: CheckpointFolder, b: CheckpointFolder, key: str, tolerance: Tolerance) -> Difference | None:
    left, right = (side.tensors.get(key) or side.objects.get(key) for side in (a, b))
    if left is None or right is None:
        return _one_sided(key, _in_words(left or right), "A" if right is None else "B")
    both = f"{_in_words(left)} in A, {_in_words(right)} in B"
    if type(left) is not type(right):
        return Difference(key, "type", both)
    if not (isinstance(left, TensorEntry) and isinstance(right, TensorEntry)):
        return _object_difference(key, a.read_bytes(key), b.read_bytes(key))
    if left.shape != right.shape or left.dtype != right.dtype:
        return Difference(key, "shape" if left.shape != right.shape else "dtype", both)
    found = tensor_difference(a, b, key, tolerance)
    if found is None:
        return None
    place = f"[{', '.join(map(str, found.index))}]" if found.index else "the only element"
    text = (
        f"{found.count} of {left.numel} elements differ, first at {place}: {found.values[0]!r} in A, "
        f"{found.values[1]!r} in B; by {found.largest:.3g} at most"
    )
    return Difference(key, "values", text, found)


def _one_sided(key: str, what: str, side: str) -> Difference:
    return Difference(key, f"only in {side}", f"{what} that only {side} has")


def _object_difference(key: str, left: bytes, right: bytes) -> Difference | None:
    """Compare two objects; their bytes may differ although their values are equal."""
    if left == right or alike(load_object(left, f"{key} in A"), load_object(right, f"{key} in B")):
        return None
    return Difference(key, "object", f"object of {len(left)} bytes in A, and other {len(right)} bytes in B")


def _in_words(entry: TensorEntry | ObjectEntry | None) -> str:
    return f"tensor {entry.shape} {dtype_name(entry.dtype)}" if isinstance(entry, TensorEntry) else "object"


def tensor_difference(
    a: CheckpointFolder, b: CheckpointFolder, key: str, tolerance: Tolerance
) -> ValueDifference | None:
    """Compare the values of a tensor of equal shape and dtype on both sides, chunk by chunk of `a`."""
    found: ValueDifference | None = None
    for box, values in a.parts(key):
        found = _merged(found, compare_piece(values, b.read_box(key, box.offsets, box.lengths), box, tolerance))
        del values  # before the next one is read
    return found


# ---- values of tensors -----------------------------------------------------------------------------------------------


def compare_piece(a: torch.Tensor, b: torch.Tensor, box: Box, tolerance: Tolerance) -> ValueDifference | None:
    """Compare the values of one box."""
    a, b = a.reshape(-1), b.reshape(-1)
    if torch.equal(_bytes(a), _bytes(b)):  # equal in every sense, NaN included
        return None
    count, first, largest = 0, None, 0.0
    for number, (left, right) in enumerate(zip(a.split(BLOCK), b.split(BLOCK), strict=True)):
        places = _differing(left, right, tolerance).nonzero().view(-1)
        if not places.numel():
            continue
        count += places.numel()
        first = number * BLOCK + int(places[0]) if first is None else first
        gaps = (_wide(left[places]) - _wide(right[places])).abs()
        largest = max(largest, float(gaps.nan_to_num(nan=0.0, posinf=0.0).max()))
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
