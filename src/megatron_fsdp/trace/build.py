"""Builds a timeline from the raw log: marks become times, phases get their ends, moments become collectives.

Records are plain tuples, since named ones take several times as long to make while a model trains:

    (BEGIN, mark, phase, unit, bytes taken or None)
    (END, mark, phase, unit)
    (TOLD, mark, number of the collective, moment, lane, counters of all axes where it is launched, else None)
    (DONE, mark, number of the collective)        the back end reports that it is done
    (BROKEN, mark)                                the model was reset: nothing that has begun ends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_fsdp.comm.lanes import Clock, Moment
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.trace.timeline import (
    BLOCKED,
    GATHER,
    LOCAL_SUM,
    REDUCE,
    Collective,
    MemorySample,
    Span,
    StepWindow,
    Timeline,
)

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
        """Close a phase; phases that began in it and are still open were ended by an exception."""
        known = [place for place, found in enumerate(self._open) if (found.phase, found.unit) == (phase, unit)]
        if not known:
            return
        depth = known[-1]
        found = self._open[depth]
        del self._open[depth:]
        name = found.phase.value if isinstance(found.phase, Phase) else found.phase
        duration_ns = now_ns - found.start_ns
        self.spans.append(Span(found.step, found.unit, name, found.start_ns, duration_ns, depth, found.num_bytes))

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
