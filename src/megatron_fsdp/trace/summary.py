"""What a timeline adds up to, per unit and step. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from megatron_fsdp.trace.intervals import covered, union
from megatron_fsdp.trace.timeline import (
    BLOCKED,
    GATHER,
    HOST,
    LOCAL_SUM,
    OPTIMIZER,
    REDUCE,
    Interval,
    Span,
    StepWindow,
    Timeline,
)

COLUMNS: dict[str, str] = {
    "gather": "gather",
    "gather across": "gather",
    "wait": "wait",
    "retire": "wait",
    BLOCKED: "wait",
    "forward": "compute",
    "backward": "compute",
    "copy": "copy",
    "reduce": "reduce",
    "reduce across": "reduce",
    LOCAL_SUM: "reduce",
    OPTIMIZER: "update",
    "install": "update",
    "release": "other",
    "finalise": "other",
    "agree": "wait",
    "norm": "update",
    "whole tensors": "other",
}
"""Phase -> where its time counts, without that of phases nested in it. So no time counts twice."""


@dataclass(frozen=True)
class Times:
    """Where the time of the compute side went, in nanoseconds; nested phases count for themselves only.

    Attributes:
        gather: Launching gathers.
        wait: Waiting for collectives, and comparing notes with other ranks.
        compute: Forward and backward of modules.
        copy: Gradients into buckets.
        reduce: Launching reductions, and on the CPU the local sums of what came in.
        update: The norm of gradients, the optimizer's step, and installing its result.
        other: Releasing weights, showing gradients, and putting whole tensors together.
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
        """All of it."""
        return sum(astuple(self))

    @classmethod
    def sum(cls, several: Iterable[Times]) -> Times:
        """Column by column."""
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
        reduce_bytes: The same, in reductions.
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
        """As `hidden_part`."""
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
        """As `hidden_part`, of all steps."""
        return hidden_part(self.steps)


def hidden_part(steps: Iterable[StepSummary]) -> float | None:
    """How much of communication was hidden behind other work: 1 - exposed / communication, from 0 to 1.

    Communication is the time in which at least one collective was in flight, from its launch until what was sent had
    come. Exposed is the part of it in which the compute side did nothing else: the compute stream on CUDA waited for a
    collective; the host on the CPU waited for one or handed one to the back end. Time counts once however many
    collectives are in flight.

    Returns:
        The part; None where nothing was sent.
    """
    known = tuple(steps)
    communication = sum(step.communication_ns for step in known)
    return 1 - sum(step.exposed_ns for step in known) / communication if communication else None


def summarise(timeline: Timeline) -> Summary:
    """Add up a timeline.

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
    """The time of each span without that of the spans nested directly in it, in nanoseconds.

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
