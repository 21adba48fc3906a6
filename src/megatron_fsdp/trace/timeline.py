"""A recording as plain data (phases, collectives and memory of one rank, on one clock), and its reader of a log.

Times are nanoseconds since the recording started. On the CPU they are the host's. On CUDA they are the device's: of
phases and waits when the compute stream arrived there, of collectives when their stream did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_fsdp.comm.collectives import Clock, Moment
from megatron_fsdp.engine.observer import Phase, close_phase

OPTIMIZER = "optimizer"
BLOCKED = "blocked"
LOCAL_SUM = "local sum"

PHASES: tuple[str, ...] = (*(phase.value for phase in Phase), OPTIMIZER, BLOCKED, LOCAL_SUM)
"""Names of phases: the engine's own; the step of an optimizer; the wait for a collective; and the local work on
its result, which on the CPU the waiting thread does."""

GATHER, REDUCE = "gather", "reduce"
HOST, STREAM = "host", "stream"
STREAMS: tuple[str, ...] = ("gather", "reduce", "outer")

Interval = tuple[int, int]
"""Start and end, in nanoseconds."""


@dataclass(frozen=True)
class Span:
    """A phase on the compute side."""

    step: int  # in which it began
    unit: int  # index; 0 for phases of the whole model
    phase: str  # one of `PHASES`
    start_ns: int
    duration_ns: int  # with nested phases
    depth: int  # how many phases it is nested in
    num_bytes: int  # bytes that this rank sends in collectives launched in it, not in nested phases

    @property
    def end_ns(self) -> int:
        """The time at which the phase ended."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Collective:
    """One launch on a stream that sent data. Times are None if the recording ended, or failed, before."""

    number: int  # counted on this rank
    step: int  # in which it was launched
    unit: int  # for which it was launched
    purpose: str  # "gather" or "reduce"
    axis: str  # name of the mesh dimension
    stream: str  # one of `STREAMS`
    num_bytes: int  # bytes that this rank sends, as `megatron_fsdp.comm.collectives` counts
    launch_ns: int  # it was about to be started
    launched_ns: int  # the back end had it
    done_ns: int | None = None  # the data had arrived, as the back end reports it to the host, else the wait
    arrived_ns: int | None = None  # the wait for the data was over
    wait_step: int | None = None  # in which the compute side waited for it
    wait_ns: int | None = None  # the compute side began to wait
    waited_ns: int | None = None  # it went on, after the local work on the result

    @property
    def in_flight(self) -> Interval | None:
        """The interval from the launch to the arrival of the data."""
        return None if self.done_ns is None else (self.launch_ns, max(self.launch_ns, self.done_ns))

    @property
    def launch(self) -> Interval:
        """The interval of handing it to the back end."""
        return self.launch_ns, self.launched_ns

    @property
    def blocked(self) -> Interval | None:
        """The interval in which the compute side waited for the data; empty if it had arrived before.

        Local work follows until `waited_ns`.
        """
        if self.wait_ns is None or self.waited_ns is None or self.arrived_ns is None:
            return None
        return self.wait_ns, min(max(self.arrived_ns, self.wait_ns), self.waited_ns)


@dataclass(frozen=True)
class MemorySample:
    """The bytes in use at the beginning of a unit's forward, backward or reduction."""

    step: int
    unit: int
    time_ns: int
    num_bytes: int


@dataclass(frozen=True)
class StepWindow:
    """The time from the first phase of a step to the first phase of the next one."""

    index: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Timeline:
    """One rank's recording."""

    rank: int  # global
    world_size: int  # ranks of the job
    device: str  # its type
    clock: str  # "host", or "stream" where times are those of the device
    units: tuple[str, ...]  # labels of all
    started_unix_ns: int  # this host's wall clock when the recording started
    is_aligned: bool  # whether all ranks left a barrier at that moment, so that their times may be compared
    is_cut: bool  # whether some step had more to record than there was room for
    recording: str  # its name, which all its ranks share; empty where ranks were not aligned
    peers: tuple[int, ...]  # the ranks that recorded together; empty where ranks were not aligned
    memory_kind: str  # the kind of the samples: "allocated" on the device, or "held" by the engine
    steps: tuple[StepWindow, ...] = ()
    spans: tuple[Span, ...] = ()  # by start; an outer span precedes its inner ones
    collectives: tuple[Collective, ...] = ()  # by launch
    memory: tuple[MemorySample, ...] = ()  # by time


# ---- from the raw log of a recorder: marks become times, phases get their ends, moments become collectives ----------
# Records are plain tuples, since named ones take several times as long to make while a model trains:
#
#     (BEGIN, mark, phase, unit, bytes taken or None)
#     (END, mark, phase, unit)
#     (TOLD, mark, number of the collective, moment, stream, counters of all axes where it is launched, else None)
#     (DONE, mark, number of the collective)        the back end reports that it is done
#     (BROKEN, mark)                                the model was reset: nothing that has begun ends

BEGIN, END, TOLD, DONE, BROKEN = range(5)
Raw = tuple[Any, ...]
Counts = tuple[int, int, int, int]
"""Gathers, reductions, bytes of gathers, bytes of reductions of one axis so far."""


@dataclass
class StepLog:
    """The records of one step after its first mark; `is_cut`: some were dropped for lack of room."""

    index: int
    start: Any
    records: list[Raw] = field(default_factory=list)
    is_cut: bool = False


@dataclass(frozen=True)
class Times:
    """A converter from marks to times: the clock of the marks, and a last mark of known time."""

    clock: Clock
    end: Any
    end_ns: int

    def of_steps(self, steps: Sequence[StepLog]) -> list[int]:
        """Return the start time of each step; step by step, since device clocks lose precision over long stretches."""
        starts, now = [], self.end_ns
        for step, later in zip(reversed(steps), [self.end, *(step.start for step in reversed(steps))], strict=False):
            now -= self.clock.elapsed_ns(step.start, later)
            starts.append(now)
        return starts[::-1]


@dataclass
class _Open:
    """A phase that has begun."""

    step: int
    phase: Phase | str
    unit: int
    start_ns: int
    num_bytes: int = 0


def build_timeline(steps: Sequence[StepLog], times: Times, axes: Sequence[str], empty: Timeline) -> Timeline:
    """Fill an empty timeline with the events of consecutive steps; axes in the order of their counters.

    Left out are phases that an exception ended or that have not ended, and collectives launched before the first step.
    """
    builder, starts = _Builder(axes), times.of_steps(steps)
    last_ns = starts[-1]
    for step, start_ns in zip(steps, starts, strict=True):
        for kind, mark, *rest in list(step.records):
            now_ns = start_ns + times.clock.elapsed_ns(step.start, mark)
            builder.take(step.index, now_ns, (kind, *rest))
            last_ns = max(last_ns, now_ns)
    windows = tuple(
        StepWindow(step.index, start, end)
        for step, start, end in zip(steps, starts, [*starts[1:], last_ns], strict=True)
    )
    return replace(
        empty,
        steps=windows,
        spans=tuple(sorted(builder.spans, key=lambda span: (span.start_ns, span.depth))),
        collectives=tuple(sorted(builder.collectives.values(), key=lambda one: one.number)),
        memory=tuple(builder.memory),
    )


class _Builder:
    """A reader of records, one after another."""

    def __init__(self, axes: Sequence[str]) -> None:
        self._axes = axes
        self._open: list[_Open] = []
        self._launches: dict[int, tuple[int, int, int, tuple[Counts, ...]]] = {}  # step, unit, time, bytes
        self.collectives: dict[int, Collective] = {}  # those that sent something, by number
        self.spans: list[Span] = []
        self.memory: list[MemorySample] = []

    def take(self, step: int, now_ns: int, record: Raw) -> None:
        """Read the next record, without its mark."""
        match record:
            case (kind, phase, unit, memory) if kind == BEGIN:
                self._open.append(_Open(step, phase, unit, now_ns))
                if memory is not None:
                    self.memory.append(MemorySample(step, unit, now_ns, memory))
            case (kind, phase, unit) if kind == END:
                self._end(now_ns, phase, unit)
            case (kind, number, Moment.LAUNCHES, _, before) if kind == TOLD:
                self._launches[number] = step, self._open[-1].unit if self._open else 0, now_ns, before
            case (kind, number, Moment.LAUNCHED, stream, after) if kind == TOLD:
                if number in self._launches:
                    self._launched(number, stream, now_ns, after)
            case (kind, number, moment, _, _) if kind == TOLD:
                if number in self.collectives:
                    self._reach(number, moment, step, now_ns)
            case (kind, number) if kind == DONE:
                if number in self.collectives:
                    self.collectives[number] = replace(self.collectives[number], done_ns=now_ns)
            case _:
                # BROKEN: phases under way never end.
                self._open.clear()

    def _end(self, now_ns: int, phase: Phase | str, unit: int) -> None:
        """Close a phase, and drop inner ones that an exception ended."""
        for found in close_phase(self._open, phase, unit)[:1]:
            name = phase.value if isinstance(phase, Phase) else phase
            duration_ns, depth = now_ns - found.start_ns, len(self._open)
            self.spans.append(Span(found.step, unit, name, found.start_ns, duration_ns, depth, found.num_bytes))

    def _launched(self, number: int, stream: str, now_ns: int, after: tuple[Counts, ...]) -> None:
        """Begin a collective, if it sends data; a single rank sends none."""
        step, unit, launch_ns, before = self._launches.pop(number)
        moved = [[now - then for then, now in zip(*each, strict=True)] for each in zip(before, after, strict=True)]
        axes = [axis for axis, counts in zip(self._axes, moved, strict=True) if any(counts)]
        if axes:
            gathers, _, *num_bytes = map(sum, zip(*moved, strict=True))
            purpose, sent = GATHER if gathers else REDUCE, sum(num_bytes)
            self.collectives[number] = Collective(number, step, unit, purpose, axes[0], stream, sent, launch_ns, now_ns)
            if self._open:
                self._open[-1].num_bytes += sent

    def _reach(self, number: int, moment: Moment, step: int, now_ns: int) -> None:
        """Record a later moment of a collective."""
        one = self.collectives[number]
        if moment is Moment.ARRIVED:
            # Without a callback of the back end, the arrival is the first sign that it is done.
            one = replace(one, arrived_ns=now_ns, done_ns=now_ns if one.done_ns is None else one.done_ns)
        elif moment is Moment.WAITS:
            one = replace(one, wait_step=step, wait_ns=now_ns)
        elif moment is Moment.WAITED:
            one = replace(one, waited_ns=now_ns)
        self.collectives[number] = one
        if one.blocked is not None and moment is Moment.WAITED and one.wait_step is not None:
            (start_ns, end_ns), depth = one.blocked, len(self._open)
            self.spans.append(Span(one.wait_step, one.unit, BLOCKED, start_ns, end_ns - start_ns, depth, 0))
            if one.purpose == REDUCE:
                self.spans.append(Span(one.wait_step, one.unit, LOCAL_SUM, end_ns, now_ns - end_ns, depth, 0))
