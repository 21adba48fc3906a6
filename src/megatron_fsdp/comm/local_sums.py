"""The local half of a reduction: sums of rows, one of each rank, in rank order, 16-bit values in float32; factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ADDED_AT_ONCE = 1 << 16
"""Elements; what is added up stays in the cache meanwhile."""


def sum_received(received: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Sum what `Axis.exchange` received; `received` is used up.

    Row after row is added in place, which takes less than half the time of a reduction over the rows and no memory.

    Args:
        received: (num_ranks * shard_numel,) in the communication dtype; overwritten.
        num_ranks: Ranks on the axis.

    Returns:
        (shard_numel,) in float32 for 16-bit inputs; else in the dtype of `received`, a view of its first row.
    """
    rows = received.view(num_ranks, -1)
    total = rows[0].to(sum_dtype(received.dtype))
    for row in rows[1:]:
        total.add_(row)
    return total


def add_up_into(rows: Sequence[torch.Tensor], out: torch.Tensor, factor: float) -> None:
    """Put the sum of two rows or more times a factor into a floating tensor that shares no memory with them.

    It is what `put_scaled` makes of the whole sum, bit for bit, and takes no memory where `out` has its dtype.
    """
    is_in_place = sum_dtype(rows[0].dtype) == out.dtype
    for start in range(0, out.numel(), _ADDED_AT_ONCE):
        parts = [row[start : start + _ADDED_AT_ONCE] for row in rows]
        target = out[start : start + _ADDED_AT_ONCE]
        if not is_in_place:
            put_scaled(_sum(parts), factor, target)
            continue
        _sum(parts, target)
        if factor != 1.0:
            target.mul_(factor)


def put_scaled(values: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """Put values times a factor into a tensor of the same shape and any floating dtype, rounded once, to that dtype.

    `torch.mul(values, factor, out=out)` alone rounds to the dtype of `values` first, where `out` has a wider one.
    """
    dtype = torch.promote_types(values.dtype, out.dtype)
    if values.dtype == dtype:
        torch.mul(values, factor, out=out)
    elif out.dtype == dtype:
        out.copy_(values).mul_(factor)
    else:
        torch.mul(values.to(dtype), factor, out=out)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are summed in: float32, or their own where that is wider or no floating dtype."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _sum(rows: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Two rows or more; into `out`, which has the dtype of the sum, or a new tensor."""
    dtype = sum_dtype(rows[0].dtype)
    if rows[0].dtype == dtype:
        total = torch.add(rows[0], rows[1], out=out)
        rest = rows[2:]
    else:
        total = rows[0].to(dtype) if out is None else out.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        total.add_(row)
    return total
