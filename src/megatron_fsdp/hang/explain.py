"""Explains a hang from the logs of all ranks: which rank stands out, where it is, and what the others wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from megatron_fsdp.engine.observer import Phase, close_phase
from megatron_fsdp.hang.log_file import NO_NUMBER, Logs, Mark, RankLog, Record, UnitFacts

_UNSURE_S = 1.5
"""Uncertainty of clocks and heartbeats, in seconds."""
_SILENT_S = 5.0
"""Seconds by which a rank on another machine must fall silent before the others to count as gone."""
_ADVICE = (
    "every rank has to call the same units in the same order, and what takes all ranks (norms, whole tensors) on every "
    "rank or on none (docs/debugging.md)"
)
_ROWS_SHOWN = 16
_FRAMES_SHOWN = 4
_PARAMETERS_SHOWN = 4

_WAITING = {
    Phase.GATHER: "starts to gather the weights of {unit}",
    Phase.WAIT: "waits for the weights of {unit}",
    Phase.REDUCE: "starts to reduce the gradients of {unit}",
    Phase.RETIRE: "waits for the reduced gradients of {unit}",
    Phase.FINALISE: "ends its backward",
    Phase.GATHER_OUTER: "gathers the weights of {unit} over the outer axis",
    Phase.REDUCE_OUTER: "reduces the gradients of {unit} over the outer axis",
    Phase.AGREE: "compares notes with the other ranks",
    Phase.NORM: "waits for the norm of all gradients",
    Phase.WHOLE: "puts whole tensors together",
    Phase.FORWARD: "computes the forward of {unit}",
    Phase.BACKWARD: "computes the backward of {unit}",
    Phase.RELEASE: "releases the weights of {unit}",
    Phase.COPY: "copies a gradient of {unit}",
    Phase.INSTALL: "installs weights",
}

# ---- what a rank was doing -------------------------------------------------------------------------------------------

ON_REQUEST = frozenset({Phase.AGREE, Phase.NORM, Phase.WHOLE})
"""Phases that take all ranks and that the caller asks for, outside of forward and backward too."""
_COMMUNICATES = ON_REQUEST | {
    Phase.GATHER,
    Phase.WAIT,
    Phase.REDUCE,
    Phase.FINALISE,
    Phase.GATHER_OUTER,
    Phase.REDUCE_OUTER,
    Phase.RETIRE,
}
_BETWEEN = ON_REQUEST | {Phase.INSTALL, Phase.REDUCE, Phase.RETIRE}


class Doing(Enum):
    """What a rank is doing."""

    NOTHING_YET = "has not called the model"
    OUTSIDE = "outside of the model"
    COMPUTES = "computes"
    WAITS = "communicates"
    FAILED = "raised an error"
    ENDED = "ended"


@dataclass(frozen=True)
class State:
    """What one rank was doing when it was last seen."""

    log: RankLog
    doing: Doing
    # the innermost phase; the last one where none is under way; None: it has not called the model
    phase: Phase | None = None
    unit: int = 0
    in_backward: bool = False  # whether autograd ran
    # the phases that communicated, since the last reset, by number
    operations: Mapping[int, Record] = field(default_factory=dict)
    failure: Record | None = None  # the event in which it failed; None: it did not
    is_inside: bool = False  # whether a phase is open, or was when the log was closed

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.log.writer.rank

    @property
    def last(self) -> Record:
        """The last event; without any, one of the moment when the log was begun."""
        began = Record(0, self.log.writer.started_ns, 0, 0, Phase.FORWARD, Mark.RESET)
        return self.log.records[-1] if self.log.records else began

    @property
    def seen_ns(self) -> int:
        """When it was last known to be there, in nanoseconds since 1970."""
        beat_ns = self.log.beat.time_ns if self.log.beat is not None else 0
        return max(self.last.time_ns, beat_ns, self.log.read_ns if self.log.alive else 0)

    @property
    def said_goodbye(self) -> bool:
        """Whether its process ended, or its log was stopped; also after a failure."""
        return self.last.mark is Mark.GOODBYE

    @property
    def is_gone(self) -> bool | None:
        """Whether its process died without closing its log; None: not known on this machine."""
        return False if self.said_goodbye else None if self.log.alive is None else not self.log.alive

    @property
    def was_terminated(self) -> bool:
        """Whether its process is dead, and SIGTERM had come."""
        return bool(self.log.termination) and not self.log.alive

    @property
    def waits(self) -> bool:
        """Whether the rank communicates."""
        return self.doing is Doing.WAITS

    @property
    def waited_in_vain(self) -> bool:
        """Whether communication ended in an error, such as that of a time limit."""
        return self.failure is not None and self.failure.phase in _COMMUNICATES

    @property
    def quiet_s(self) -> float:
        """Seconds without any event before the rank was last seen."""
        return (self.seen_ns - self.last.time_ns) / 1e9

    @property
    def count(self) -> int:
        """Operations started since the start or the last reset."""
        return max(self.operations, default=0)


def state_of(log: RankLog) -> State:
    """Derive from a log what its rank was doing."""
    if not log.records:
        return State(log, Doing.NOTHING_YET)
    open_phases, failure = _unwind(log.records)
    over = next((record for record in reversed(log.records) if record.mark is not Mark.GOODBYE), log.records[-1])
    innermost = failure or (open_phases[-1] if open_phases else over)
    phase, unit, doing = innermost.phase, innermost.unit, Doing.OUTSIDE
    if failure is not None:  # how it ended follows from that
        doing = Doing.FAILED
    elif log.records[-1].mark is Mark.GOODBYE:
        doing = Doing.ENDED
    elif open_phases:
        doing = Doing.WAITS if phase in _COMMUNICATES else Doing.COMPUTES
    if doing in (Doing.OUTSIDE, Doing.COMPUTES) and log.beat is not None and log.beat.collective != NO_NUMBER:
        doing, phase, unit = Doing.WAITS, log.beat.phase, log.beat.unit
    return State(
        log, doing, phase, unit, innermost.in_backward, _operations(log.records), failure, is_inside=bool(open_phases)
    )


def _unwind(records: Sequence[Record]) -> tuple[list[Record], Record | None]:
    """Return the open phases, outermost first, and the failure that was not recovered from."""
    stack: list[Record] = []
    failure: Record | None = None
    for record in records:
        if record.mark is Mark.BEGINS:
            stack.append(record)
        elif record.mark in (Mark.ENDS, Mark.FAILED):
            close_phase(stack, record.phase, record.unit)
            if record.mark is Mark.FAILED:
                failure = failure or record
        elif record.mark is Mark.RESET:
            stack.clear()
            failure = None
    return stack, failure


def _operations(records: Sequence[Record]) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for record in records:
        if record.mark is Mark.RESET:
            found.clear()
        elif record.mark is Mark.LAUNCHES:
            found[record.counted] = record
    return found


# ---- what is odd ----------------------------------------------------------------------------------------------------


class Kind(Enum):
    """The kind of a finding."""

    NOTHING = "nothing is odd"
    MISSING = "a rank has no log"
    DIED = "a process died"
    RAISED = "a rank raised an error"
    ENDED = "a rank ended its program"
    DIFFERENT = "ranks communicate different things"
    RESET = "not all ranks were reset"
    ELSEWHERE = "a rank is busy elsewhere"
    BEHIND = "a rank is behind"
    EQUAL = "all ranks wait for the same"


@dataclass(frozen=True)
class Row:
    """One rank, for a table."""

    rank: int
    model: int
    is_odd: bool  # whether it is the one, or one of those
    doing: str  # what it did when it was last seen, as the predicate of a sentence
    quiet_s: float  # for how long nothing had happened then
    operations: int  # how many operations it had started
    process: str  # "alive", "dead", "ended", "SIGTERM" for one that it ended, or "elsewhere" for one on another machine


@dataclass(frozen=True)
class Finding:
    """What is odd among the ranks that share one model: which of them, and in words."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Why a run stands still: a finding for each set of ranks that share a model, all ranks, and what else to know."""

    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()

    @property
    def is_odd(self) -> bool:
        """Whether any finding names a problem."""
        return any(finding.kind is not Kind.NOTHING for finding in self.findings)

    def __str__(self) -> str:
        sentences = [text for finding in self.findings for text in finding.sentences]
        rows = [
            f"  rank {row.rank}{f' model {row.model}' if row.model else ''}{' (odd)' if row.is_odd else ''}: "
            f"{row.doing}; {row.operations} operations, quiet for {seconds(row.quiet_s)}, process {row.process}"
            for row in sorted(self.rows, key=lambda row: not row.is_odd)[:_ROWS_SHOWN]
        ]
        more = [f"  and {len(self.rows) - len(rows)} more"] if len(self.rows) > len(rows) else []
        return "\n".join([*(sentences or ["no rank stands out"]), *rows, *more, *self.remarks])


def explain(logs: Logs, after_s: float) -> Explanation:
    """Explain why a run stands still; a rank that waits hangs when nothing has happened for `after_s` seconds."""
    states = [state_of(log) for log in logs.ranks]
    sets: dict[tuple[int, tuple[int, ...]], list[State]] = {}
    for state in states:
        sets.setdefault((state.log.writer.model, state.log.writer.peers), []).append(state)
    findings = {key: _Ranks(key[1], members, after_s).find() for key, members in sets.items()}
    rows = [_row(state, findings[state.log.writer.model, state.log.writer.peers]) for state in states]
    return Explanation(tuple(findings.values()), tuple(rows), logs.remarks)


def _row(state: State, finding: Finding) -> Row:
    process = {True: "alive", False: "dead", None: "elsewhere"}[state.log.alive]
    process = "ended" if state.said_goodbye else "SIGTERM" if state.was_terminated else process
    writer = state.log.writer
    doing = doing_told(state, writer.units)
    return Row(writer.rank, writer.model, writer.rank in finding.ranks, doing, state.quiet_s, state.count, process)


class _Ranks:
    """The ranks that share one model."""

    def __init__(self, peers: Sequence[int], members: Sequence[State], after_s: float) -> None:
        self.peers = peers
        self.states = {state.rank: state for state in members}
        self.after_s = after_s
        self.units = members[0].log.writer.units
        self.newest_ns = max(state.seen_ns for state in self.states.values())

    def find(self) -> Finding:
        """Find what is odd; causes come before their consequences."""
        # Differences come before ends: back ends end a process that receives what it does not expect.
        for look in (self._missing, self._different, self._over, self._elsewhere):
            finding = look()
            if finding is not None:
                return replace(finding, sentences=tuple(dict.fromkeys(finding.sentences)))
        return Finding(Kind.NOTHING)

    def _stuck(self) -> list[State]:
        """Return the ranks that communicate and have been quiet for too long, or whose wait ended in an error."""
        return [
            state
            for state in self.states.values()
            if state.waited_in_vain or (state.waits and self._stands_still(state))
        ]

    def _stands_still(self, state: State) -> bool:
        """Return whether a rank had been quiet for too long when it was last seen.

        A launcher ends the remaining ranks by SIGTERM when one has failed. If a wait had ended in an error, by whatever
        time limit, a remaining rank stood still if it was quiet for longer than clocks and heartbeats are uncertain.
        """
        is_rest = state.was_terminated and any(other.waited_in_vain for other in self.states.values())
        return state.quiet_s >= (min(self.after_s, 2 * _UNSURE_S) if is_rest else self.after_s)

    # ---- ranks that are not there -------------------------------------------------------------------------------

    def _missing(self) -> Finding | None:
        missing = tuple(rank for rank in self.peers if rank not in self.states)
        began_ns = max(state.log.writer.started_ns for state in self.states.values())
        if not missing or (self.newest_ns - began_ns) / 1e9 < self.after_s:
            return None
        told = (
            f"{listed(missing)} left no log here: never started, stopped before its model was wrapped, or writes to "
            "another folder"
        )
        return Finding(Kind.MISSING, missing, (told, *self._others_told(missing)))

    def _over(self) -> Finding | None:
        """Find ranks whose process or pass is over while others go on: the first of them.

        A rank that stood still before its process died, while others waited, is reported as standing still.
        """
        stuck = self._stuck()
        own = {rank: at for rank, state in self.states.items() if (at := _own_error_ns(state)) is not None}
        dead = {rank: self.states[rank] for rank in self._gone()}
        gone = {rank: state.seen_ns for rank, state in dead.items() if not (stuck and self._stands_still(state))}
        first_own = min(own.values(), default=None)
        first_gone = min(gone.values(), default=None)
        if first_own is not None and (first_gone is None or first_own <= first_gone + _UNSURE_S * 1e9):
            return self._raised(tuple(rank for rank, at in own.items() if at == first_own))
        if first_gone is not None:
            return self._died(tuple(rank for rank, at in gone.items() if at <= first_gone + _UNSURE_S * 1e9))
        ended = tuple(
            rank for rank, state in self.states.items() if state.doing is Doing.ENDED and not state.waited_in_vain
        )
        if ended and stuck:
            told = f"{listed(ended)} ended its program, while others go on"
            return Finding(Kind.ENDED, ended, (told, *self._others_told(ended)))
        return None

    def _gone(self) -> list[int]:
        """Return the ranks whose process died before those of others; none where all died together.

        A rank whose communication failed first is not the cause, however it ended.
        """
        if all(state.is_gone for state in self.states.values()):
            unsuspecting = [rank for rank, state in self.states.items() if state.failure is None]
            if 0 < len(unsuspecting) < len(self.states):  # the others still saw communication fail
                return unsuspecting
            return [rank for rank, state in self.states.items() if self._silent_s(state) > 2 * _UNSURE_S]
        return [
            rank
            for rank, state in self.states.items()
            if not state.waited_in_vain
            and state.doing is not Doing.ENDED
            and (state.is_gone or (state.is_gone is None and self._silent_s(state) > _SILENT_S))
        ]

    def _silent_s(self, state: State) -> float:
        return (self.newest_ns - state.seen_ns) / 1e9

    def _raised(self, ranks: tuple[int, ...]) -> Finding:
        state = self.states[ranks[0]]
        place = f"outside of the model in step {state.last.step}"
        is_inside = state.failure is not None or state.is_inside
        if is_inside:
            # A hook of autograd fails untold, in the backward of a unit that never ends.
            place = f"while it {phase_told(state, self.units)} {where(state.last.step, state)}"
        told = f"{listed(ranks)} raised an error {place}"
        words = tuple(f"  {line}" for line in state.log.words.splitlines())
        unit = self._unit_line(state) if is_inside else ()
        return Finding(Kind.RAISED, ranks, (f"{told}:", *words, *unit, *self._others_told(ranks)))

    def _died(self, ranks: tuple[int, ...]) -> Finding:
        state = self.states[ranks[0]]
        told = f"{listed(ranks)} {self._death_told(ranks[0])}; the last thing known: it {doing_told(state, self.units)}"
        stack = self._stack_told(ranks[0])
        return Finding(Kind.DIED, ranks, (told, *stack, *self._unit_line(state), *self._others_told(ranks)))

    def _death_told(self, rank: int) -> str:
        """Say how the process of a rank ended, as the predicate of a sentence."""
        process = self.states[rank].log.writer.process
        which = f"(process {process.pid} on {process.host})"
        if self.states[rank].was_terminated:
            return f"was ended by SIGTERM {which}"
        return f"died without a word {which}, as after kill -9 or when memory runs out"

    def _stack_told(self, rank: int) -> tuple[str, ...]:
        """Return the Python stack of a rank when SIGTERM ended it."""
        stack = self.states[rank].log.termination.rpartition("(most recent call first)")[2].splitlines()
        frames = [line for line in stack if line.startswith("  File ")][:_FRAMES_SHOWN]
        return ("when SIGTERM came it ran, innermost first:", *frames) if frames else ()

    # ---- ranks that do something else ---------------------------------------------------------------------------

    def _different(self) -> Finding | None:
        epochs = {state.last.epoch for state in self.states.values()}
        if len(epochs) > 1:
            return self._reset_alone() if self._stuck() else None
        found = first_mismatch({rank: state.operations for rank, state in self.states.items()})
        if found is None:
            return None
        number, alike = found
        camps = [(ranks, self.states[ranks[0]].operations[number]) for ranks in alike]
        (others, usual), *odd = sorted(camps, key=lambda camp: -len(camp[0]))
        # Of as many against as many, nobody can say who is right.
        is_tie = len(others) == len(odd[0][0])
        ranks = tuple(sorted(rank for camp, _ in (camps if is_tie else odd) for rank in camp))
        if odd[0][1].kind == usual.kind:
            told = (
                f"{listed(odd[0][0])} did something else than {listed(others)} before operation {number}, the "
                "first that all logs hold"
            )
            return Finding(Kind.DIFFERENT, ranks, (told, _ADVICE))
        does = [f"{subject(camp)} {operation_told(operation, self.units)}" for camp, operation in odd]
        place = f"(operation {number}, {where(usual.step, usual)})"
        told = f"{', '.join(does)} where {subject(others)} {operation_told(usual, self.units)} {place}"
        unit = () if usual.phase in ON_REQUEST else (unit_told(self.units[usual.unit]),)
        return Finding(Kind.DIFFERENT, ranks, (told, *unit, *self._stuck_told(), _ADVICE))

    def _reset_alone(self) -> Finding:
        by_epoch: dict[int, list[int]] = {}
        for rank, state in self.states.items():
            by_epoch.setdefault(state.last.epoch, []).append(rank)
        fewest = min(by_epoch.values(), key=len)
        odd = tuple(fewest)
        told = f"{listed(odd)} called reset() a different number of times than the other ranks; call it on every rank"
        return Finding(Kind.RESET, odd, (told, *self._stuck_told()))

    # ---- ranks that do not come ---------------------------------------------------------------------------------

    def _elsewhere(self) -> Finding | None:
        stuck = self._stuck()
        if not stuck:
            return None
        elsewhere = [state for state in self.states.values() if not state.waits and not state.waited_in_vain]
        if elsewhere:
            ranks = tuple(state.rank for state in elsewhere)
            told = [f"rank {s.rank} {doing_told(s, self.units)} since {seconds(s.quiet_s)}" for s in elsewhere[:4]]
            more = (f"and {len(elsewhere) - 4} more",) if len(elsewhere) > 4 else ()
            ends = self._later_deaths_told(ranks)
            return Finding(Kind.ELSEWHERE, ranks, (*told, *more, *ends, *self._others_told(ranks)))
        counts = {rank: state.count for rank, state in self.states.items()}
        least = min(counts.values())
        behind = tuple(rank for rank, count in counts.items() if count == least)
        if least < max(counts.values()):
            told_behind = f"{listed(behind)} is behind: it {doing_told(self.states[behind[0]], self.units)}"
            return Finding(Kind.BEHIND, behind, (told_behind, *self._others_told(behind)))
        if len(stuck) < len(self.states):
            return None
        told_equal = (
            "all ranks wait for the same, and all have come: the network is slow or broken, or collectives of another "
            "library are in the way (TORCH_FR_BUFFER_SIZE=2000 has PyTorch record those)"
        )
        return Finding(Kind.EQUAL, (), (told_equal, *self._stuck_told()))

    def _later_deaths_told(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Say how odd ranks ended after they had stood still."""
        gone = self._gone()
        dead = [rank for rank in ranks if rank in gone or self.states[rank].was_terminated]
        told = [f"after that rank {rank} {self._death_told(rank)}" for rank in dead[:4]]
        return (*told, *(self._stack_told(dead[0]) if dead else ()))

    # ---- sentences ----------------------------------------------------------------------------------------------

    def _others_told(self, odd: Sequence[int]) -> tuple[str, ...]:
        """Say what the other ranks do, and what the unit of the first that waits holds."""
        return self._told([state for rank, state in self.states.items() if rank not in odd])

    def _stuck_told(self) -> tuple[str, ...]:
        return self._told([state for state in self.states.values() if state.waits or state.waited_in_vain])

    def _told(self, states: Sequence[State]) -> tuple[str, ...]:
        doing: dict[str, list[State]] = {}
        for state in states:
            doing.setdefault(doing_told(state, self.units), []).append(state)
        lines = []
        for what, alike in doing.items():
            number = f" (operation {alike[0].count})" if alike[0].count and alike[0].waits else ""
            quiet = seconds(max(state.quiet_s for state in alike))
            lines.append(f"{subject(state.rank for state in alike)} {what}{number} since {quiet}")
        waiting = [state for state in states if state.waits or state.waited_in_vain]
        return (*lines, *(self._unit_line(waiting[0]) if waiting else ()))

    def _unit_line(self, state: State) -> tuple[str, ...]:
        """Say what the unit of a rank's operation holds, if it has one."""
        return (unit_told(self.units[state.unit]),) if state.phase is not None and state.phase not in ON_REQUEST else ()


def _own_error_ns(state: State) -> int | None:
    """Return when a rank raised an error that did not come from communication."""
    if state.failure is not None:
        return None if state.waited_in_vain else state.failure.time_ns
    return state.last.time_ns if state.doing is Doing.ENDED and state.log.words else None


# ---- the first operation in which ranks differ -----------------------------------------------------------------------


def first_mismatch(by_rank: Mapping[int, Mapping[int, Record]]) -> tuple[int, list[tuple[int, ...]]] | None:
    """Return the number of the first operation in which ranks differ, and the ranks that did the same in it.

    The lowest rank comes first; None where nothing differs as far as all logs reach.
    """
    logs = {rank: operations for rank, operations in sorted(by_rank.items()) if operations}
    if len(logs) < 2:
        return None
    first = max(min(operations) for operations in logs.values())
    for number in range(first, max(max(operations) for operations in logs.values()) + 1):
        there = {rank: operations[number] for rank, operations in logs.items() if number in operations}
        # Hashes differ also where what differs has been overwritten.
        camps: dict[object, list[int]] = {}
        for rank, operation in there.items():
            camps.setdefault((operation.kind, operation.hash), []).append(rank)
        if len(camps) > 1:
            return number, [tuple(ranks) for ranks in camps.values()]
    return None


# ---- words -----------------------------------------------------------------------------------------------------------


def listed(ranks: Iterable[int]) -> str:
    """Name some ranks: `rank 3`, or `ranks 0, 1, 4-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [
        str(first) if first == last else f"{first}, {last}" if last == first + 1 else f"{first}-{last}"
        for first, last in spans
    ]
    return f"rank{'s' if len(spans) > 1 or (spans and spans[0][0] != spans[0][1]) else ''} {', '.join(parts)}"


def subject(ranks: Iterable[int]) -> str:
    """Name some ranks in front of a verb in the singular."""
    told = listed(ranks)
    return f"each of {told}" if told.startswith("ranks") else told


def seconds(value: float) -> str:
    """Format a time with one decimal."""
    return f"{value:.1f} s"


def where(step: int, at: Record | State) -> str:
    """Name the place of an event, such as `in the forward of step 3`; steps count from 0, as optimizer steps do."""
    if not at.in_backward and at.phase in _BETWEEN:
        return f"in step {step}"
    return f"in the {'backward' if at.in_backward else 'forward'} of step {step}"


def operation_told(operation: Record, units: Sequence[UnitFacts]) -> str:
    """Describe an operation, as the predicate of a sentence about one rank."""
    size = f" ({operation.num_bytes} bytes)" if operation.num_bytes else ""
    return _WAITING[operation.phase].format(unit=units[operation.unit].label) + size


def doing_told(state: State, units: Sequence[UnitFacts]) -> str:
    """Describe what a rank is doing, as the predicate of a sentence about it."""
    if state.phase is None:
        return "has not called the model yet"
    if state.doing is Doing.ENDED:
        return "has ended its program"
    doing = phase_told(state, units)
    if state.doing is Doing.FAILED:
        return f"raised an error while it {doing}"
    if state.doing is Doing.OUTSIDE:
        return f"runs code outside of the model (the last it did there: {doing}, step {state.last.step})"
    return f"{doing} {where(state.last.step, state)}"


def phase_told(state: State, units: Sequence[UnitFacts]) -> str:
    """Describe the phase of a rank, as the predicate of a sentence."""
    assert state.phase is not None
    return _WAITING[state.phase].format(unit=units[state.unit].label)


def unit_told(unit: UnitFacts) -> str:
    """Describe what a unit holds."""
    names = unit.parameters
    more = f" and {len(names) - _PARAMETERS_SHOWN} more" if len(names) > _PARAMETERS_SHOWN else ""
    shown = ", ".join(names[:_PARAMETERS_SHOWN]) or "no parameters"
    count = f"{len(names)} parameter{'s' if len(names) != 1 else ''}"
    return f"{unit.label} holds {shown}{more} ({count}, {unit.num_bytes} bytes)"
