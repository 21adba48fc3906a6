"""A checksum of a global tensor that does not depend on how the tensor is cut. Pure.

    sum over elements i of  bits(x_i) * w(i)   mod 2^64,   w(i) odd

bits(x) is the pattern of the element's bytes as an integer, i its place in the flattened global tensor, and w simple
tabulation hashing of i (Zobrist 1970; Patrascu and Thorup, "The power of simple tabulation hashing", 2012): the
exclusive or of table entries, one per 16 bits of i. Parts of a tensor are summed wherever they lie, in any order, and
the sums added. Any change of a single element changes the sum for certain, since w is odd; for other changes the odds
of going unseen are about 2^-32 at worst. It is no protection against someone who wants to deceive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch

NAME = "tabulation64-v1"
BLOCK = 1 << 16
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum_box(values: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The share of a box in the checksum of its global tensor.

    Args:
        values: The elements of the box, shaped as it is; any dense dtype.
        offsets: Of the box in the global tensor.
        shape: Of the global tensor.

    Returns:
        A number from 0 to 2^64 - 1; add those of all boxes with `combine`.
    """
    if values.numel() == 0:
        return 0
    values = values.detach().contiguous()
    lengths = tuple(values.shape)
    if lengths == tuple(shape):
        return int(_run_sum(values.reshape(-1), 0)) & _MASK
    run_dims = _contiguous_dims(lengths, shape)  # these trailing dimensions form runs of the flattened tensor
    run = math.prod(lengths[len(lengths) - run_dims :])
    runs = values.reshape(-1, run)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    outer = len(lengths) - run_dims
    total = torch.zeros((), dtype=torch.int64, device=values.device)  # no wait for the device until the end
    if run >= BLOCK // 16 or runs.shape[0] == 1:
        for position, start in enumerate(_starts(lengths[:outer], strides[:outer], first).tolist()):
            total += _run_sum(runs[position], start)
        return int(total) & _MASK
    rows = max(1, BLOCK // run)
    starts = _starts(lengths[:outer], strides[:outer], first).to(values.device)
    inside = torch.arange(run, device=values.device)
    for row in range(0, runs.shape[0], rows):
        places = starts[row : row + rows, None] + inside
        total += (_bits(runs[row : row + rows]) * _weights(places)).sum()
    return int(total) & _MASK


def combine(sums: Iterable[int]) -> int:
    """The checksum of the whole from those of its boxes."""
    return sum(sums) & _MASK


def _contiguous_dims(lengths: Sequence[int], shape: Sequence[int]) -> int:
    """How many trailing dimensions of a box are one stretch of the flattened tensor."""
    whole = 0
    for length, total in zip(reversed(lengths), reversed(shape), strict=True):
        if length != total:
            return min(whole + 1, len(lengths))
        whole += 1
    return whole


def _starts(lengths: Sequence[int], strides: Sequence[int], first: int) -> torch.Tensor:
    """Flattened index of the first element of each run of a box."""
    starts = torch.tensor([first], dtype=torch.int64)
    for length, stride in zip(lengths, strides, strict=True):
        starts = (starts[:, None] + torch.arange(length, dtype=torch.int64) * stride).reshape(-1)
    return starts


def _run_sum(values: torch.Tensor, start: int) -> torch.Tensor:
    """Sum over consecutive elements; block by block, where all but the lowest 16 bits of the index are constant."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    done, numel = 0, values.shape[0]
    low = _table(0, values.device)
    while done < numel:
        block, inside = divmod(start + done, BLOCK)
        count = min(BLOCK - inside, numel - done)
        weights = low[inside : inside + count] ^ _high_part(block) if block else low[inside : inside + count]
        part = _bits(values[done : done + count]).mul_(weights).sum()
        if count == numel:
            return part
        total += part
        done += count
    return total


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The elements' bytes as integers, in a tensor of our own."""
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    if values.dtype == torch.complex128:
        parts = torch.view_as_real(values).view(torch.int64)
        return parts[..., 0] ^ (parts[..., 1] * _ODD)
    return values.view(_INTEGERS[values.element_size()]).to(torch.int64, copy=True)


_ODD = 0x5851F42D4C957F2D


def _weights(places: torch.Tensor) -> torch.Tensor:
    """The weights of places; as `_run_sum` has it, by look-up."""
    found = _table(0, places.device)[places & 0xFFFF]
    for level in range(1, 3):  # 2^48 elements
        high = (places >> (16 * level)) & 0xFFFF
        found = found ^ _table(level, places.device)[high]
    return found


def _high_part(block: int) -> int:
    """The tables' entries for all but the lowest 16 bits of an index."""
    found, level = int(_table(1, torch.device("cpu"))[block & 0xFFFF]), 2
    while block >> 16:
        block >>= 16
        found ^= int(_table(level, torch.device("cpu"))[block & 0xFFFF])
        level += 1
    return found


@functools.lru_cache(maxsize=16)
def _table(level: int, device: torch.device) -> torch.Tensor:
    """2^16 pseudo-random 64-bit numbers by splitmix64 (Steele et al. 2014); odd at level 0, above it even, 0 at 0."""
    x = torch.arange(1, BLOCK + 1, dtype=torch.int64) + level * BLOCK
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    if level == 0:
        return (x | 1).to(device)
    x = x & -2
    x[0] = 0  # so that indices below 2^16, 2^32 ... need no further tables
    return x.to(device)


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right; torch's keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
