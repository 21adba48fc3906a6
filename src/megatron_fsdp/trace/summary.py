"""The share of communication that was hidden behind other work, for each step of a timeline."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron_fsdp.trace.timeline import HOST, Interval, Timeline


@dataclass(frozen=True)
class StepTimes:
    """The times of one step on one rank, in nanoseconds."""

    rank: int
    step: int
    duration_ns: int  # from the step's first phase to that of the next step
    communication_ns: int  # how long some collective was in flight
    exposed_ns: int  # of these, how long the compute side waited for a collective or, on the CPU, launched one

    @property
    def hidden(self) -> float | None:
        """The fraction of communication that was hidden (see `hidden_part`)."""
        return hidden_part((self,))


def hidden_part(steps: Iterable[StepTimes]) -> float | None:
    """Return the fraction of communication that was hidden behind other work: 1 - exposed / communication.

    Communication is the time with at least one collective in flight, from its launch to the arrival of its data. It is
    exposed while the compute side did nothing else: the compute stream on CUDA waited for a collective; the host on the
    CPU waited for one or handed one to the back end. Time counts once, however many collectives are in flight. The
    fraction is None without communication.
    """
    known = tuple(steps)
    communication = sum(step.communication_ns for step in known)
    return 1 - sum(step.exposed_ns for step in known) / communication if communication else None


def summarise(timeline: Timeline) -> tuple[StepTimes, ...]:
    """Sum up the communication of each step of a timeline; a wait counts in its own step."""
    flights = union(one.in_flight for one in timeline.collectives if one.in_flight is not None)
    exposed: Counter[int] = Counter()
    for one in timeline.collectives:
        if timeline.clock == HOST:
            exposed[one.step] += covered(one.launch, flights)
        if one.blocked is not None and one.wait_step is not None:
            exposed[one.wait_step] += covered(one.blocked, flights)
    return tuple(
        StepTimes(
            rank=timeline.rank,
            step=window.index,
            duration_ns=window.end_ns - window.start_ns,
            communication_ns=covered((window.start_ns, window.end_ns), flights),
            exposed_ns=exposed[window.index],
        )
        for window in timeline.steps
    )


# ---- sets of moments as sorted, disjoint intervals ------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, sorted by time; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def covered(interval: Interval, moments: Sequence[Interval]) -> int:
    """Return the length of an interval's part that the result of `union` covers."""
    start, end = interval
    # The last that begins before the interval may reach into it.
    first = max(0, bisect_right(moments, start, key=itemgetter(0)) - 1)
    meeting = moments[first : bisect_left(moments, end, key=itemgetter(0))]
    return sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in meeting)
