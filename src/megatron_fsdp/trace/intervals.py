"""Sets of moments as sorted, disjoint intervals. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from megatron_fsdp.trace.timeline import Interval


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All moments that lie in any of them, as disjoint intervals by time; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def covered(interval: Interval, moments: Sequence[Interval]) -> int:
    """How much of an interval a union covers.

    Args:
        interval: Start and end.
        moments: What `union` returned.
    """
    start, end = interval
    first = max(0, bisect_right(moments, start, key=_start) - 1)  # the last that begins before it may reach into it
    total = 0
    for place in range(first, len(moments)):
        if moments[place][0] >= end:
            break
        total += max(0, min(end, moments[place][1]) - max(start, moments[place][0]))
    return total


def _start(interval: Interval) -> int:
    return interval[0]
