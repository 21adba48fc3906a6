"""A recording as plain data: phases, collectives and memory of one rank, on one clock; and how it is made of a log.

Times are nanoseconds since the recording started. On the CPU they are those of the host. On CUDA they are those of the
device: of phases and waits when the compute stream got there, of collectives when their lane's stream did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_fsdp.comm.lanes import Clock, Moment
from megatron_fsdp.engine.observer import Phase, close_phase

OPTIMIZER = "optimizer"
BLOCKED = "blocked"
LOCAL_SUM = "local sum"

PHASES: tuple[str, ...] = (*(phase.value for phase in Phase), OPTIMIZER, BLOCKED, LOCAL_SUM)
"""Names of phases: the engine's own; the step of an optimizer; the wait for a collective; and the local work on
its result, which on the CPU the waiting thread does."""

GATHER, REDUCE = "gather", "reduce"
HOST, STREAM = "host", "stream"
LANES: tuple[str, ...] = ("gather", "reduce", "outer")

Interval = tuple[int, int]
"""Start and end, in nanoseconds."""


@dataclass(frozen=True)
class Span:
    """A phase on the compute side."""

    step: int  # in which it began
    unit: int  # index; 0 for phases of the whole model
    phase: str  # one of `PHASES`
    start_ns: int
    duration_ns: int  # with what is nested in it
    depth: int  # how many phases it is nested in
    num_bytes: int  # what this rank sends in the collectives that were launched in it and in nothing nested in it

    @property
    def end_ns(self) -> int:
        """The time at which the phase ended."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Collective:
    """One launch on a lane that sent something. Times are None where the recording ended, or failed, before."""

    number: int  # counted on this rank
    step: int  # in which it was launched
    unit: int  # for which it was launched
    purpose: str  # "gather" or "reduce"
    axis: str  # name of the mesh dimension
    lane: str  # one of `LANES`
    num_bytes: int  # what this rank sends, as `megatron_fsdp.comm.axis` counts
    launch_ns: int  # it was about to be started
    launched_ns: int  # the back end had it
    done_ns: int | None  # the data had arrived: as the back end reports it to the host, else as the wait found it
    arrived_ns: int | None  # the wait for what was sent was over
    wait_step: int | None  # in which the compute side waited for it
    wait_ns: int | None  # the compute side began to wait
    waited_ns: int | None  # it went on, after the local work on the result

    @property
    def in_flight(self) -> Interval | None:
        """The interval from the launch until what was sent had arrived."""
        return None if self.done_ns is None else (self.launch_ns, max(self.launch_ns, self.done_ns))

    @property
    def launch(self) -> Interval:
        """The interval in which it was handed to the back end."""
        return self.launch_ns, self.launched_ns

    @property
    def blocked(self) -> Interval | None:
        """The interval in which the compute side waited for the data; empty where it had arrived before.

        What follows until `waited_ns` is local work.
        """
        if self.wait_ns is None or self.waited_ns is None or self.arrived_ns is None:
            return None
        return self.wait_ns, min(max(self.arrived_ns, self.wait_ns), self.waited_ns)


@dataclass(frozen=True)
class MemorySample:
    """Bytes in use when a forward, a backward or a reduction of a unit began."""

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
    memory_kind: str  # what the samples count: "allocated" on the device, or "held" by the engine
    steps: tuple[StepWindow, ...]
    spans: tuple[Span, ...]  # by start; what contains stands before what it contains
    collectives: tuple[Collective, ...]  # by launch
    memory: tuple[MemorySample, ...]  # by time


TABLES: dict[str, type] = {"steps": StepWindow, "spans": Span, "collectives": Collective, "memory": MemorySample}
"""Fields of a `Timeline` that are rows of one class each."""


# ---- from the raw log of a recorder: marks become times, phases get their ends, moments become collectives ----------
# Records are plain tuples, since named ones take several times as long to make while a model trains:
#
#     (BEGIN, mark, phase, unit, bytes taken or None)
#     (END, mark, phase, unit)
#     (TOLD, mark, number of the collective, moment, lane, counters of all axes where it is launched, else None)
#     (DONE, mark, number of the collective)        the back end reports that it is done
#     (BROKEN, mark)                                the model was reset: nothing that has begun ends

BEGIN, END, TOLD, DONE, BROKEN = range(5)
Raw = tuple[Any, ...]
Counts = tuple[int, int, int, int]
"""Gathers, reductions, bytes of gathers, bytes of reductions of one axis so far."""


@dataclass
class StepLog:
    """The records of one step after its first mark; some were dropped for want of room if it is cut."""

    index: int
    start: Any
    records: list[Raw] = field(default_factory=list)
    is_cut: bool = False


@dataclass(frozen=True)
class Times:
    """How to convert marks into times: by their clock, and a last mark whose time since the start is known."""

    clock: Clock
    end: Any
    end_ns: int

    def of_steps(self, steps: Sequence[StepLog]) -> list[int]:
        """Return when each step started; step by step, since clocks of devices lose precision over long stretches."""
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


@dataclass
class _Life:
    """The moments of a collective that are known."""

    step: int
    unit: int
    lane: str
    depth: int
    before: tuple[Counts, ...]
    after: tuple[Counts, ...] = ()
    done_ns: int | None = None
    wait_step: int | None = None
    moments: dict[Moment, int] = field(default_factory=dict)


def build_timeline(steps: Sequence[StepLog], times: Times, axes: Sequence[str], empty: Timeline) -> Timeline:
    """Fill an empty timeline with the events of steps that followed each other; axes in the order of their counters.

    Phases that an exception ended are left out, and those that have not ended; collectives that were launched before
    the first step are left out, too.
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
        collectives=tuple(builder.collectives()),
        memory=tuple(builder.memory),
    )


class _Builder:
    """Reads records one after another."""

    def __init__(self, axes: Sequence[str]) -> None:
        self._axes = axes
        self._open: list[_Open] = []
        self._lives: dict[int, _Life] = {}
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
            case (kind, number, moment, lane, sent) if kind == TOLD:
                self._tell((step, now_ns), number, moment, lane, sent)
            case (kind, number) if kind == DONE:
                if number in self._lives:
                    self._lives[number].done_ns = now_ns
            case _:
                self._open.clear()

    def _end(self, now_ns: int, phase: Phase | str, unit: int) -> None:
        """Close a phase; those inside of it that an exception ended are left out."""
        for found in close_phase(self._open, phase, unit)[:1]:
            name = phase.value if isinstance(phase, Phase) else phase
            duration_ns, depth = now_ns - found.start_ns, len(self._open)
            self.spans.append(Span(found.step, unit, name, found.start_ns, duration_ns, depth, found.num_bytes))

    def _tell(
        self, now: tuple[int, int], number: int, moment: Moment, lane: str, sent: tuple[Counts, ...] | None
    ) -> None:
        """Record a moment of a collective, at a step and time."""
        step, now_ns = now
        if moment is Moment.LAUNCHES:
            unit = self._open[-1].unit if self._open else 0
            assert sent is not None
            self._lives[number] = _Life(step, unit, lane, 0, sent)
        life = self._lives.get(number)
        if life is None:
            return  # launched before the first step
        life.moments[moment] = now_ns
        if moment is Moment.LAUNCHED:
            assert sent is not None
            life.after = sent
            if self._open:
                self._open[-1].num_bytes += sum(_moved(life.before, life.after)[2:])
        elif moment is Moment.WAITS:
            life.wait_step, life.depth = step, len(self._open)
        elif moment is Moment.WAITED:
            self._waited(life)

    def _waited(self, life: _Life) -> None:
        """Record the wait, and the local work after it, as phases."""
        collective = self._collective(0, life)
        if collective is None or collective.blocked is None:
            return
        assert life.wait_step is not None
        assert collective.waited_ns is not None
        (start_ns, end_ns), unit = collective.blocked, life.unit
        self.spans.append(Span(life.wait_step, unit, BLOCKED, start_ns, end_ns - start_ns, life.depth, 0))
        if collective.purpose == REDUCE:
            sum_ns = collective.waited_ns - end_ns
            self.spans.append(Span(life.wait_step, unit, LOCAL_SUM, end_ns, sum_ns, life.depth, 0))

    def collectives(self) -> list[Collective]:
        """Return all collectives that sent something."""
        found = (self._collective(number, life) for number, life in self._lives.items())
        return [collective for collective in found if collective is not None]

    def _collective(self, number: int, life: _Life) -> Collective | None:
        gathers, reductions, gather_bytes, reduce_bytes = _moved(life.before, life.after)
        if not gathers + reductions:
            return None  # it failed, or a single rank had nothing to send
        at = life.moments.get
        arrived_ns = at(Moment.ARRIVED)
        return Collective(
            number=number,
            step=life.step,
            unit=life.unit,
            purpose=GATHER if gathers else REDUCE,
            axis=next(n for n, b, a in zip(self._axes, life.before, life.after, strict=True) if a != b),
            lane=life.lane,
            num_bytes=gather_bytes + reduce_bytes,
            launch_ns=life.moments[Moment.LAUNCHES],
            launched_ns=life.moments[Moment.LAUNCHED],
            done_ns=arrived_ns if life.done_ns is None else life.done_ns,
            arrived_ns=arrived_ns,
            wait_step=life.wait_step,
            wait_ns=at(Moment.WAITS),
            waited_ns=at(Moment.WAITED),
        )


def _moved(before: tuple[Counts, ...], after: tuple[Counts, ...]) -> Counts:
    """Return how much the sum of all counters grew; zeros where the launch failed."""
    if not after:
        return 0, 0, 0, 0
    gathers, reductions, gather_bytes, reduce_bytes = (
        sum(late[place] - early[place] for early, late in zip(before, after, strict=True)) for place in range(4)
    )
    return gathers, reductions, gather_bytes, reduce_bytes
