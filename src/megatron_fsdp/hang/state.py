"""Derives what a rank was doing from its records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from megatron_fsdp.engine.collective_log import NO_NUMBER, Mark, Record
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.hang.reading import RankLog

_COMMUNICATES = frozenset(
    phase.value
    for phase in (
        Phase.GATHER,
        Phase.WAIT,
        Phase.REDUCE,
        Phase.FINALISE,
        Phase.GATHER_OUTER,
        Phase.REDUCE_OUTER,
        Phase.RETIRE,
        Phase.AGREE,
        Phase.NORM,
        Phase.WHOLE,
    )
)


class Doing(Enum):
    """What a rank is doing."""

    NOTHING_YET = "has not called the model"
    OUTSIDE = "outside of the model"
    COMPUTES = "computes"
    WAITS = "communicates"
    FAILED = "raised an error"
    ENDED = "ended"


@dataclass(frozen=True)
class Operation:
    """One phase that communicated.

    Attributes:
        number: Which one since the start or the last reset, from 1.
        phase: Name of the phase.
        unit: The unit's index.
        num_bytes: How many bytes it communicates.
        hash: Over all up to this one.
        step: In which step.
        in_backward: Whether autograd ran.
    """

    number: int
    phase: str
    unit: int
    num_bytes: int
    hash: int
    step: int
    in_backward: bool

    @property
    def kind(self) -> tuple[str, int, int]:
        """The properties that must be equal on all ranks."""
        return self.phase, self.unit, self.num_bytes


@dataclass(frozen=True)
class State:
    """What one rank was doing when it was last seen.

    Attributes:
        rank: Global rank.
        doing: What it is about.
        phase: Name of the innermost phase; of the last one where none is under way.
        unit: Its unit.
        step: The step.
        in_backward: Whether autograd ran.
        since_ns: When the last thing happened, in nanoseconds since 1970.
        seen_ns: When it was last known to be there.
        operations: The last that it started since the last reset, by number.
        failed_ns: When it failed; None: it did not.
        failed_in: Name of the phase that the error came out of.
        is_gone: Its process died without closing its log; None: not known on this machine.
        epoch: How often the model was reset, modulo 256.
        said_goodbye: Its process ended, or its log was stopped; also after a failure.
        is_inside: Whether a phase is open, or was when the log was closed.
        was_terminated: Its process is dead, and SIGTERM had come.
    """

    rank: int
    doing: Doing
    phase: str
    unit: int
    step: int
    in_backward: bool
    since_ns: int
    seen_ns: int
    operations: dict[int, Operation]
    failed_ns: int | None = None
    failed_in: str = ""
    is_gone: bool | None = False
    epoch: int = 0
    said_goodbye: bool = False
    is_inside: bool = False
    was_terminated: bool = False

    @property
    def waits(self) -> bool:
        """Whether the rank communicates."""
        return self.doing is Doing.WAITS

    @property
    def waited_in_vain(self) -> bool:
        """Whether communication ended in an error, such as that of a time limit."""
        return self.failed_ns is not None and communicates(self.failed_in)

    @property
    def quiet_s(self) -> float:
        """Seconds without any event before the rank was last seen."""
        return max(0, self.seen_ns - self.since_ns) / 1e9

    @property
    def count(self) -> int:
        """Operations started since the start or the last reset."""
        return max(self.operations, default=0)


def state_of(log: RankLog) -> State:
    """Derive from a log what its rank was doing."""
    writer, records = log.writer, log.records
    began_ns = records[-1].time_ns if records else writer.started_ns
    seen_ns = max(began_ns, log.beat.time_ns if log.beat is not None else 0, log.read_ns if log.alive else 0)
    is_gone = None if log.alive is None else not log.alive
    was_terminated = bool(log.termination) and not log.alive
    if not records:
        nothing = State(writer.rank, Doing.NOTHING_YET, "", 0, 0, False, began_ns, seen_ns, {}, is_gone=is_gone)
        return replace(nothing, was_terminated=was_terminated)
    names = writer.phases
    open_phases, failure = _unwind(records)
    last = records[-1]
    over = next((record for record in reversed(records) if record.mark is not Mark.GOODBYE), last)
    innermost = failure or (open_phases[-1] if open_phases else over)
    phase, unit = names[innermost.phase], innermost.unit
    doing = Doing.OUTSIDE
    said_goodbye = last.mark is Mark.GOODBYE
    if failure is not None:  # how it ended follows from that
        doing = Doing.FAILED
    elif said_goodbye:
        doing = Doing.ENDED
    elif open_phases:
        doing = Doing.WAITS if phase in _COMMUNICATES else Doing.COMPUTES
    if doing in (Doing.OUTSIDE, Doing.COMPUTES) and log.beat is not None and log.beat.unfinished != NO_NUMBER:
        doing, phase, unit = Doing.WAITS, names[log.beat.phase], log.beat.unit
    return State(
        writer.rank,
        doing,
        phase,
        unit,
        last.step,
        innermost.in_backward,
        last.time_ns,
        seen_ns,
        _operations(records, names),
        failure.time_ns if failure is not None else None,
        names[failure.phase] if failure is not None else "",
        False if said_goodbye else is_gone,
        last.epoch,
        said_goodbye,
        bool(open_phases),
        was_terminated,
    )


def communicates(phase: str) -> bool:
    """Return whether a phase of this name communicates."""
    return phase in _COMMUNICATES


def _unwind(records: tuple[Record, ...]) -> tuple[list[Record], Record | None]:
    """Return the open phases, outermost first, and the failure that was not recovered from."""
    stack: list[Record] = []
    failure: Record | None = None
    for record in records:
        if record.mark is Mark.BEGINS:
            stack.append(record)
        elif record.mark in (Mark.ENDS, Mark.FAILED):
            for place in reversed(range(len(stack))):
                if (stack[place].phase, stack[place].unit) == (record.phase, record.unit):
                    del stack[place:]
                    break
            if record.mark is Mark.FAILED:
                failure = failure or record
        elif record.mark is Mark.RESET:
            stack.clear()
            failure = None
    return stack, failure


def _operations(records: tuple[Record, ...], names: tuple[str, ...]) -> dict[int, Operation]:
    found: dict[int, Operation] = {}
    for record in records:
        if record.mark is Mark.RESET:
            found.clear()
        elif record.mark is Mark.LAUNCHES:
            found[record.count] = Operation(
                record.count,
                names[record.phase],
                record.unit,
                record.num_bytes,
                record.hash,
                record.step,
                record.in_backward,
            )
    return found
