"""Several ranks beside each other: one clock for all, means, and who keeps the others waiting. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from megatron_fsdp.errors import TraceError
from megatron_fsdp.trace.summary import StepSummary, Summary, Times, hidden_part, summarise
from megatron_fsdp.trace.timeline import Collective, Timeline


@dataclass(frozen=True)
class RankMean:
    """One rank, in the mean of the steps looked at.

    Attributes:
        rank: Which one.
        step_ns: Length of a step.
        own_ns: What of it the rank did not wait. Collectives make steps of all ranks equally long, so the slowest rank
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
    """One unit, in the mean of the steps and ranks looked at.

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
    """What several ranks did in the same steps.

    Attributes:
        steps: The steps looked at.
        world_size: Ranks of the job.
        is_aligned: Whether their times may be compared to better than their wall clocks allow.
        is_cut: Whether some recording lacks something for want of room.
        hidden: How much of communication was hidden, over all ranks; None where nothing was sent.
        ranks: Each rank.
        units: Each unit that did something, in the order of the model.
        slowest_rank: The one that waited least.
        skew_ns: What it worked longer than the rank that worked least.
        slowest_unit: The one that took most time; waits, which name who suffers, and optimizers left out.
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
    """Put ranks beside each other.

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
    """The steps that every rank recorded, or the one asked for, if they did.

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
    """Let times of all ranks count from the same moment.

    Where all left a barrier when they started, they do already, to within the time that a message takes. Else their
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
