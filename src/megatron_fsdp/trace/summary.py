"""Sums of timelines per unit and step, and a comparison of ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import itemgetter

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.timeline import (
    BLOCKED,
    HOST,
    LOCAL_SUM,
    OPTIMIZER,
    Interval,
    Span,
    Timeline,
)

_PHASES_OF = {
    "gather": ("gather", "outer gather"),
    "wait": ("wait", "retire", "agree", BLOCKED),
    "compute": ("forward", "backward"),
    "copy": ("copy",),
    "reduce": ("reduce", "outer reduce", LOCAL_SUM),
    "update": ("install", "norm", OPTIMIZER),
    "other": ("release", "finalise", "whole tensors"),
}
COLUMNS: dict[str, str] = {phase: column for column, phases in _PHASES_OF.items() for phase in phases}
"""Phase -> the column of its time without nested phases, so that no time counts twice."""
_SUMMED = ("duration_ns", "communication_ns", "exposed_ns", "collectives", "gather_bytes", "reduce_bytes")


@dataclass(frozen=True)
class Times:
    """Time of the compute side in nanoseconds; a phase does not count the phases nested in it."""

    gather: int = 0  # launching gathers
    wait: int = 0  # waiting for collectives, and agreeing with other ranks
    compute: int = 0  # forward and backward of modules
    copy: int = 0  # gradients into buckets
    reduce: int = 0  # launching reductions, and on the CPU the local sums of what was received
    update: int = 0  # the norm of gradients, the optimizer's step, and installing its result
    other: int = 0  # resharding weights, exposing gradients, and assembling whole tensors

    @property
    def total(self) -> int:
        """The sum of all columns."""
        return sum(astuple(self))

    @classmethod
    def sum(cls, several: Iterable[Times]) -> Times:
        """Sum several column by column."""
        return cls(*map(sum, zip(*(astuple(times) for times in (cls(), *several)), strict=True)))


@dataclass(frozen=True)
class Row:
    """Where time, bytes and memory went: of a unit or of all, in a step or in the mean of several."""

    rank: int | None  # None: the mean of several
    unit: int | None  # index; None: all units together
    step: int | None  # None: the mean of several
    times: Times  # of the compute side
    duration_ns: float = 0  # from the step's first phase to that of the next step; of a unit, the sum of its times
    communication_ns: float = 0  # how long some collective was in flight; 0 of a unit: it is counted for all only
    # how long communication was in flight and the compute side waited for a collective (of this unit) or, on the CPU,
    # launched one
    exposed_ns: float = 0
    collectives: float = 0  # launched in the step
    gather_bytes: float = 0  # what a rank sent in gathers launched in the step
    reduce_bytes: float = 0  # what a rank sent in reductions launched in the step
    memory_bytes: int | None = None  # the largest sample, if there is one

    @property
    def own_ns(self) -> float:
        """Time without waits. Collectives make steps of all ranks equally long; the slowest rank waits least."""
        return self.duration_ns - self.times.wait

    @property
    def outside_ns(self) -> float:
        """The rest of the training loop: what phases do not take of a step."""
        return self.duration_ns - self.times.total

    @property
    def sent_bytes(self) -> float:
        """What a rank sent."""
        return self.gather_bytes + self.reduce_bytes

    @property
    def hidden(self) -> float | None:
        """The fraction of communication that was hidden (see `hidden_part`)."""
        return hidden_part((self,))


@dataclass(frozen=True)
class Summary:
    """A timeline in numbers."""

    units: tuple[Row, ...]  # those that did something, by step, then by unit
    steps: tuple[Row, ...]  # by time

    @property
    def hidden(self) -> float | None:
        """The fraction of all steps' communication that was hidden (see `hidden_part`)."""
        return hidden_part(self.steps)


def hidden_part(steps: Iterable[Row]) -> float | None:
    """Return the fraction of communication that was hidden behind other work: 1 - exposed / communication.

    Communication is the time in which at least one collective was in flight, from its launch until its data had
    come. Exposed is the part of it in which the compute side did nothing else: the compute stream on CUDA waited for a
    collective; the host on the CPU waited for one or handed one to the back end. Time counts once however many
    collectives are in flight. None where nothing was sent.
    """
    known = tuple(steps)
    communication = sum(step.communication_ns for step in known)
    return 1 - sum(step.exposed_ns for step in known) / communication if communication else None


def summarise(timeline: Timeline) -> Summary:
    """Sum up a timeline of one rank: times, bytes and memory of each step, and of each unit in it.

    The times of all units and `outside_ns` add up to the step's duration, exposed times and bytes of units to those of
    the step.
    """
    flights = union(one.in_flight for one in timeline.collectives if one.in_flight is not None)
    units = _of_units(timeline, flights)
    steps = []
    for window in timeline.steps:
        step = _total([unit for unit in units if unit.step == window.index], 1, rank=timeline.rank, step=window.index)
        communication_ns = covered((window.start_ns, window.end_ns), flights)
        steps.append(replace(step, duration_ns=window.end_ns - window.start_ns, communication_ns=communication_ns))
    return Summary(units, tuple(steps))


def own_times(spans: Sequence[Span]) -> list[int]:
    """Return the time of each span without that of the spans nested directly in it; outer spans come first."""
    own = [span.duration_ns for span in spans]
    around: list[int] = []
    for place, span in enumerate(spans):
        while around and (spans[around[-1]].depth >= span.depth or spans[around[-1]].end_ns < span.end_ns):
            around.pop()
        if around:
            own[around[-1]] -= span.duration_ns
        around.append(place)
    return own


def _of_units(timeline: Timeline, flights: Sequence[Interval]) -> tuple[Row, ...]:
    times: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)  # by step and unit
    sums: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    memory: dict[tuple[int, int], int] = {}
    for span, own_ns in zip(timeline.spans, own_times(timeline.spans), strict=True):
        times[span.step, span.unit][COLUMNS[span.phase]] += own_ns
        sums[span.step, span.unit]["duration_ns"] += own_ns
    for one in timeline.collectives:
        launched = sums[one.step, one.unit]
        launched["collectives"] += 1
        launched[f"{one.purpose}_bytes"] += one.num_bytes
        if timeline.clock == HOST:
            launched["exposed_ns"] += covered(one.launch, flights)
        if one.blocked is not None and one.wait_step is not None:
            sums[one.wait_step, one.unit]["exposed_ns"] += covered(one.blocked, flights)
    for sample in timeline.memory:
        key = sample.step, sample.unit
        memory[key] = max(sample.num_bytes, memory.get(key, 0))
    return tuple(
        Row(timeline.rank, unit, step, Times(**times[key]), **sums[key], memory_bytes=memory.get(key))
        for key in sorted({*sums, *memory})
        for step, unit in [key]
    )


def _total(
    rows: Sequence[Row], count: int, *, rank: int | None = None, unit: int | None = None, step: int | None = None
) -> Row:
    """Return the sum of rows divided by `count`, with the largest of their memory."""
    summed = {name: sum(getattr(row, name) for row in rows) / count for name in _SUMMED}
    times = Times(*(value // count for value in astuple(Times.sum(row.times for row in rows))))
    memory = max((row.memory_bytes for row in rows if row.memory_bytes is not None), default=None)
    return Row(rank, unit, step, times, **summed, memory_bytes=memory)


# ---- sets of moments as sorted, disjoint intervals ------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Unite intervals into disjoint ones by time; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def covered(interval: Interval, moments: Sequence[Interval]) -> int:
    """Return how much of an interval is covered by what `union` returned."""
    start, end = interval
    # The last that begins before the interval may reach into it.
    first = max(0, bisect_right(moments, start, key=itemgetter(0)) - 1)
    meeting = moments[first : bisect_left(moments, end, key=itemgetter(0))]
    return sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in meeting)


# ---- several ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Means and differences of several ranks over the same steps."""

    steps: tuple[int, ...]  # those looked at
    world_size: int  # ranks of the job
    is_aligned: bool  # whether their times may be compared to better than their wall clocks allow
    is_cut: bool  # whether some recording lacks something for want of room
    hidden: float | None  # how much of communication was hidden, over all ranks; None where nothing was sent
    ranks: tuple[Row, ...]  # each rank, in the mean of the steps
    units: tuple[Row, ...]  # each that did something, in the order of the model, in the mean of steps and ranks
    unit_skews_ns: tuple[float, ...]  # of each, between the ranks that spent most and least time on it, without waits
    slowest_rank: int  # the one that waited least
    skew_ns: float  # how much longer it worked than the rank that worked least
    slowest_unit: str  # that took most time, without optimizers and without waits, which another may cause


def compare(timelines: Sequence[Timeline], step: int | None = None) -> Comparison:
    """Compare ranks of one recording over one step, or over all steps that every rank recorded."""
    steps = common_steps(timelines, step)
    summaries = [summarise(timeline) for timeline in timelines]
    by_rank = [[row for row in summary.steps if row.step in steps] for summary in summaries]
    found = [row for summary in summaries for row in summary.units if row.step in steps]
    ranks = [_total(rows, len(steps), rank=rows[0].rank) for rows in by_rank]
    units, skews = [], []
    for index in sorted({row.unit for row in found if row.unit is not None}):
        rows = [row for row in found if row.unit == index]
        units.append(_total(rows, len(steps) * len(timelines), unit=index))
        own = [sum(row.own_ns for row in rows if row.rank == rank.rank) / len(steps) for rank in ranks]
        skews.append(max(own) - min(own))
    slowest = max(ranks, key=lambda rank: rank.own_ns)
    slowest_unit = max(units, key=lambda unit: unit.own_ns - unit.times.update, default=None)
    return Comparison(
        steps=steps,
        world_size=timelines[0].world_size,
        is_aligned=all(timeline.is_aligned for timeline in timelines),
        is_cut=any(timeline.is_cut for timeline in timelines),
        hidden=hidden_part(row for rows in by_rank for row in rows),
        ranks=tuple(ranks),
        units=tuple(units),
        unit_skews_ns=tuple(skews),
        slowest_rank=slowest.rank or 0,
        skew_ns=slowest.own_ns - min(rank.own_ns for rank in ranks),
        slowest_unit="" if slowest_unit is None else timelines[0].units[slowest_unit.unit or 0],
    )


def common_steps(timelines: Sequence[Timeline], step: int | None = None) -> tuple[int, ...]:
    """Return the steps that every rank recorded, or the one asked for, if they did."""
    if not timelines:
        raise TraceError("no timeline was given; give those of one or more ranks")
    indices = [{window.index for window in timeline.steps} for timeline in timelines]
    common = tuple(sorted(set.intersection(*indices)))
    if step is not None and step not in common:
        known = f"those of all ranks are {', '.join(map(str, common))}" if common else "ranks share none"
        raise TraceError(f"step {step} was not recorded; {known}")
    if not common:
        raise TraceError("these ranks recorded different steps; start all of them together, with align=True")
    return common if step is None else (step,)
