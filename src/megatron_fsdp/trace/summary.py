"""Sums of timelines per unit and step, and a comparison of ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.timeline import (
    BLOCKED,
    GATHER,
    HOST,
    LOCAL_SUM,
    OPTIMIZER,
    REDUCE,
    Collective,
    Interval,
    Span,
    StepWindow,
    Timeline,
)

COLUMNS: dict[str, str] = {
    "gather": "gather",
    "outer gather": "gather",
    "wait": "wait",
    "retire": "wait",
    BLOCKED: "wait",
    "forward": "compute",
    "backward": "compute",
    "copy": "copy",
    "reduce": "reduce",
    "outer reduce": "reduce",
    LOCAL_SUM: "reduce",
    OPTIMIZER: "update",
    "install": "update",
    "release": "other",
    "finalise": "other",
    "agree": "wait",
    "norm": "update",
    "whole tensors": "other",
}
"""Phase -> the column of its time without nested phases, so that no time counts twice."""


@dataclass(frozen=True)
class Times:
    """Time of the compute side in nanoseconds; a phase does not count the phases nested in it.

    Attributes:
        gather: Launching gathers.
        wait: Waiting for collectives, and agreeing with other ranks.
        compute: Forward and backward of modules.
        copy: Gradients into buckets.
        reduce: Launching reductions, and on the CPU the local sums of what was received.
        update: The norm of gradients, the optimizer's step, and installing its result.
        other: Resharding weights, exposing gradients, and assembling whole tensors.
    """

    gather: int = 0
    wait: int = 0
    compute: int = 0
    copy: int = 0
    reduce: int = 0
    update: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """The sum of all columns."""
        return sum(astuple(self))

    @classmethod
    def sum(cls, several: Iterable[Times]) -> Times:
        """Sum several column by column."""
        return cls(*map(sum, zip(*(astuple(times) for times in (cls(), *several)), strict=True)))


@dataclass(frozen=True)
class UnitStep:
    """One unit in one step.

    Attributes:
        step: The step.
        unit: Index of the unit.
        times: Where the time went.
        exposed_ns: How long communication was in flight and the compute side waited for this unit's or, on the CPU,
            launched it.
        gather_bytes: What this rank sent for it in gathers launched in this step.
        reduce_bytes: What this rank sent for it in reductions launched in this step.
        memory_bytes: The largest sample; None without one.
    """

    step: int
    unit: int
    times: Times
    exposed_ns: int
    gather_bytes: int
    reduce_bytes: int
    memory_bytes: int | None


@dataclass(frozen=True)
class StepSummary:
    """One step.

    Attributes:
        step: Which one.
        duration_ns: From its first phase to that of the next step.
        times: Where the time went, all units together.
        outside_ns: What is left: the rest of the training loop.
        communication_ns: How long some collective was in flight.
        exposed_ns: How much of that was not hidden behind other work.
        collectives: Launched in it.
        gather_bytes: Sent in gathers launched in it.
        reduce_bytes: Sent in reductions launched in it.
        memory_bytes: The largest sample; None without one.
    """

    step: int
    duration_ns: int
    times: Times
    outside_ns: int
    communication_ns: int
    exposed_ns: int
    collectives: int
    gather_bytes: int
    reduce_bytes: int
    memory_bytes: int | None

    @property
    def hidden(self) -> float | None:
        """The fraction of this step's communication that was hidden (see `hidden_part`)."""
        return hidden_part((self,))


@dataclass(frozen=True)
class Summary:
    """A timeline in numbers.

    Attributes:
        rank: Whose.
        units: By step, then by unit; those that did something.
        steps: By time.
    """

    rank: int
    units: tuple[UnitStep, ...]
    steps: tuple[StepSummary, ...]

    @property
    def hidden(self) -> float | None:
        """The fraction of all steps' communication that was hidden (see `hidden_part`)."""
        return hidden_part(self.steps)


def hidden_part(steps: Iterable[StepSummary]) -> float | None:
    """Return the fraction of communication that was hidden behind other work: 1 - exposed / communication.

    Communication is the time in which at least one collective was in flight, from its launch until its data had
    come. Exposed is the part of it in which the compute side did nothing else: the compute stream on CUDA waited for a
    collective; the host on the CPU waited for one or handed one to the back end. Time counts once however many
    collectives are in flight.

    Returns:
        The fraction, 0 to 1; None where nothing was sent.
    """
    known = tuple(steps)
    communication = sum(step.communication_ns for step in known)
    return 1 - sum(step.exposed_ns for step in known) / communication if communication else None


def summarise(timeline: Timeline) -> Summary:
    """Sum up a timeline per step and unit.

    Args:
        timeline: Of one rank.

    Returns:
        Times, bytes and memory of each step, and of each unit in it. The times of all units and `outside_ns` add up to
        the step's duration, exposed times and bytes of units to those of the step.
    """
    flights = union(one.in_flight for one in timeline.collectives if one.in_flight is not None)
    units = _of_units(timeline, flights)
    by_step: dict[int, list[UnitStep]] = defaultdict(list)
    for unit in units:
        by_step[unit.step].append(unit)
    launched = Counter(one.step for one in timeline.collectives for _ in range(one.count))
    return Summary(
        timeline.rank,
        units,
        tuple(
            _of_step(window, by_step[window.index], covered((window.start_ns, window.end_ns), flights), launched)
            for window in timeline.steps
        ),
    )


def own_times(spans: Sequence[Span]) -> list[int]:
    """Return the time of each span without that of the spans nested directly in it, in nanoseconds.

    Args:
        spans: By start, those that contain others before these.
    """
    own = [span.duration_ns for span in spans]
    around: list[int] = []
    for place, span in enumerate(spans):
        while around and (spans[around[-1]].depth >= span.depth or spans[around[-1]].end_ns < span.end_ns):
            around.pop()
        if around:
            own[around[-1]] -= span.duration_ns
        around.append(place)
    return own


def _of_units(timeline: Timeline, flights: Sequence[Interval]) -> tuple[UnitStep, ...]:
    times: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for span, own_ns in zip(timeline.spans, own_times(timeline.spans), strict=True):
        times[span.step, span.unit][COLUMNS[span.phase]] += own_ns
    exposed: dict[tuple[int, int], int] = defaultdict(int)
    sent: dict[tuple[int, int, str], int] = defaultdict(int)
    for one in timeline.collectives:
        sent[one.step, one.unit, one.purpose] += one.num_bytes
        times[one.step, one.unit]  # it did something
        if timeline.clock == HOST:
            exposed[one.step, one.unit] += covered(one.launch, flights)
        if one.blocked is not None and one.wait_step is not None:
            exposed[one.wait_step, one.unit] += covered(one.blocked, flights)
    memory: dict[tuple[int, int], int] = {}
    for sample in timeline.memory:
        key = sample.step, sample.unit
        memory[key] = max(sample.num_bytes, memory.get(key, 0))
    return tuple(
        UnitStep(
            *key,
            Times(**times[key]),
            exposed[key],
            sent[*key, GATHER],
            sent[*key, REDUCE],
            memory.get(key),
        )
        for key in sorted(times.keys() | exposed.keys() | memory.keys())
    )


def _of_step(
    window: StepWindow, units: Sequence[UnitStep], communication_ns: int, launched: Mapping[int, int]
) -> StepSummary:
    times, duration_ns = Times.sum(unit.times for unit in units), window.end_ns - window.start_ns
    return StepSummary(
        step=window.index,
        duration_ns=duration_ns,
        times=times,
        outside_ns=duration_ns - times.total,
        communication_ns=communication_ns,
        exposed_ns=sum(unit.exposed_ns for unit in units),
        collectives=launched[window.index],
        gather_bytes=sum(unit.gather_bytes for unit in units),
        reduce_bytes=sum(unit.reduce_bytes for unit in units),
        memory_bytes=max((unit.memory_bytes for unit in units if unit.memory_bytes is not None), default=None),
    )


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
    """Return how much of an interval a union covers.

    Args:
        interval: Start and end.
        moments: What `union` returned.
    """
    start, end = interval
    # The last that begins before the interval may reach into it.
    first = max(0, bisect_right(moments, start, key=lambda moment: moment[0]) - 1)
    total = 0
    for place in range(first, len(moments)):
        if moments[place][0] >= end:
            break
        total += max(0, min(end, moments[place][1]) - max(start, moments[place][0]))
    return total


# ---- several ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMean:
    """Means of one rank over the compared steps.

    Attributes:
        rank: Which one.
        step_ns: Length of a step.
        own_ns: Time in it without waits. Collectives make steps of all ranks equally long, so the slowest rank
            is the one that waits least.
        times: Where the time went.
        communication_ns: How long some collective was in flight.
        exposed_ns: How much of that was not hidden.
        hidden: 1 - exposed / communication; None where nothing was sent.
        sent_bytes: What it sent.
        memory_bytes: The largest sample of all these steps; None without one.
    """

    rank: int
    step_ns: float
    own_ns: float
    times: Times
    communication_ns: float
    exposed_ns: float
    hidden: float | None
    sent_bytes: float
    memory_bytes: int | None


@dataclass(frozen=True)
class UnitMean:
    """Means of one unit over the compared steps and ranks.

    Attributes:
        unit: Its label.
        times: Where the time went.
        exposed_ns: Communication that was not hidden.
        sent_bytes: What a rank sent for it.
        memory_bytes: The largest sample; None without one.
        skew_ns: Between the ranks that spent most and least time on it, waits left out.
    """

    unit: str
    times: Times
    exposed_ns: float
    sent_bytes: float
    memory_bytes: int | None
    skew_ns: float


@dataclass(frozen=True)
class Comparison:
    """Means and differences of several ranks over the same steps.

    Attributes:
        steps: The steps looked at.
        world_size: Ranks of the job.
        is_aligned: Whether their times may be compared to better than their wall clocks allow.
        is_cut: Whether some recording lacks something for want of room.
        hidden: How much of communication was hidden, over all ranks; None where nothing was sent.
        ranks: Each rank.
        units: Each unit that did something, in the order of the model.
        slowest_rank: The one that waited least.
        skew_ns: How much longer it worked than the rank that worked least.
        slowest_unit: The one that took most time, without optimizers and without waits, which another may cause.
    """

    steps: tuple[int, ...]
    world_size: int
    is_aligned: bool
    is_cut: bool
    hidden: float | None
    ranks: tuple[RankMean, ...]
    units: tuple[UnitMean, ...]
    slowest_rank: int
    skew_ns: float
    slowest_unit: str


def compare(timelines: Sequence[Timeline], step: int | None = None) -> Comparison:
    """Compare ranks over the same steps.

    Args:
        timelines: One or more, of one recording.
        step: Look at this step only; None: at all that every rank recorded.

    Returns:
        Means and differences.

    Raises:
        TraceError: No rank is given, or not all recorded that step.
    """
    steps = common_steps(timelines, step)
    summaries = [_only(summarise(timeline), steps) for timeline in timelines]
    ranks = tuple(_rank_mean(summary) for summary in summaries)
    units = tuple(_unit_means(timelines[0].units, summaries, len(steps)))
    slowest = max(ranks, key=lambda rank: rank.own_ns)
    return Comparison(
        steps=steps,
        world_size=timelines[0].world_size,
        is_aligned=all(timeline.is_aligned for timeline in timelines),
        is_cut=any(timeline.is_cut for timeline in timelines),
        hidden=hidden_part(found for summary in summaries for found in summary.steps),
        ranks=ranks,
        units=units,
        slowest_rank=slowest.rank,
        skew_ns=slowest.own_ns - min(rank.own_ns for rank in ranks),
        slowest_unit=max(units, key=_own_ns, default=_NOBODY).unit,
    )


def common_steps(timelines: Sequence[Timeline], step: int | None = None) -> tuple[int, ...]:
    """Return the steps that every rank recorded, or the one asked for, if they did.

    Raises:
        TraceError: There is none.
    """
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


def on_one_clock(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """Shift times of all ranks so that they count from the same moment.

    Ranks that left a barrier together when they started already do, to within the time of a message. Otherwise their
    wall clocks decide.
    """
    if all(timeline.is_aligned for timeline in timelines):
        return tuple(timelines)
    first = min(timeline.started_unix_ns for timeline in timelines)
    return tuple(_shifted(timeline, timeline.started_unix_ns - first) for timeline in timelines)


def _shifted(timeline: Timeline, by_ns: int) -> Timeline:
    return replace(
        timeline,
        steps=tuple(replace(one, start_ns=one.start_ns + by_ns, end_ns=one.end_ns + by_ns) for one in timeline.steps),
        spans=tuple(replace(one, start_ns=one.start_ns + by_ns) for one in timeline.spans),
        collectives=tuple(_later(one, by_ns) for one in timeline.collectives),
        memory=tuple(replace(one, time_ns=one.time_ns + by_ns) for one in timeline.memory),
    )


_TIMES_OF_COLLECTIVE = ("launch_ns", "launched_ns", "done_ns", "arrived_ns", "wait_ns", "waited_ns")


def _later(one: Collective, by_ns: int) -> Collective:
    known = {name: getattr(one, name) for name in _TIMES_OF_COLLECTIVE}
    return replace(one, **{name: value + by_ns for name, value in known.items() if value is not None})


def _only(summary: Summary, steps: Sequence[int]) -> Summary:
    return replace(
        summary,
        units=tuple(unit for unit in summary.units if unit.step in steps),
        steps=tuple(step for step in summary.steps if step.step in steps),
    )


_NOBODY = UnitMean("", Times(), 0, 0, None, 0)


def _own_ns(unit: UnitMean) -> int:
    return unit.times.total - unit.times.update - unit.times.wait


def _rank_mean(summary: Summary) -> RankMean:
    steps: Sequence[StepSummary] = summary.steps
    count = len(steps)
    return RankMean(
        rank=summary.rank,
        step_ns=sum(step.duration_ns for step in steps) / count,
        own_ns=sum(step.duration_ns - step.times.wait for step in steps) / count,
        times=_mean((step.times for step in steps), count),
        communication_ns=sum(step.communication_ns for step in steps) / count,
        exposed_ns=sum(step.exposed_ns for step in steps) / count,
        hidden=summary.hidden,
        sent_bytes=sum(step.gather_bytes + step.reduce_bytes for step in steps) / count,
        memory_bytes=_most(step.memory_bytes for step in steps),
    )


def _unit_means(labels: Sequence[str], summaries: Sequence[Summary], steps: int) -> Iterator[UnitMean]:
    for index, label in enumerate(labels):
        by_rank = [[unit for unit in summary.units if unit.unit == index] for summary in summaries]
        found = [unit for units in by_rank for unit in units]
        if not found:
            continue
        own = [sum(unit.times.total - unit.times.wait for unit in units) / steps for units in by_rank]
        count = steps * len(summaries)
        yield UnitMean(
            unit=label,
            times=_mean((unit.times for unit in found), count),
            exposed_ns=sum(unit.exposed_ns for unit in found) / count,
            sent_bytes=sum(unit.gather_bytes + unit.reduce_bytes for unit in found) / count,
            memory_bytes=_most(unit.memory_bytes for unit in found),
            skew_ns=max(own) - min(own),
        )


def _mean(times: Iterable[Times], count: int) -> Times:
    return Times(*(value // count for value in astuple(Times.sum(times))))


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
