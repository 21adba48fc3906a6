"""Explain a hang from the logs of all ranks: find the rank that stands out, and the collective that waits for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby

from megatron_fsdp.engine.observer import ON_REQUEST, Phase, close_phase
from megatron_fsdp.hang.log_file import NO_NUMBER, Logs, Mark, RankLog, Record, UnitFacts

_UNSURE_S = 1.5
"""Uncertainty of clocks and heartbeats, in seconds."""
_SILENT_S = 5.0
"""Seconds by which a rank on another machine must fall silent before the others to count as gone."""
_ADVICE = (
    "every rank has to call the same units in the same order, and what takes all ranks (norms, whole tensors) on every "
    "rank or on none (mfsdp docs debugging)"
)
_ROWS_SHOWN = 16
_FRAMES_SHOWN = 4
_PARAMETERS_SHOWN = 4

_WAITING = {
    Phase.UNSHARD: "starts to gather the weights of {unit}",
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
    Phase.RESHARD: "reshards the weights of {unit}",
    Phase.COPY: "copies a gradient of {unit}",
    Phase.INSTALL: "installs weights",
}

# ---- the activity of a rank ------------------------------------------------------------------------------------------

_BETWEEN = ON_REQUEST | {Phase.INSTALL, Phase.REDUCE, Phase.RETIRE}
_COMPUTES = {Phase.FORWARD, Phase.BACKWARD, Phase.RESHARD, Phase.COPY, Phase.INSTALL}


class Doing(Enum):
    """The activity of a rank."""

    NOTHING_YET = "has not called the model yet"
    OUTSIDE = "outside of the model"
    COMPUTES = "computes"
    WAITS = "communicates"
    FAILED = "raised an error"
    ENDED = "ended"


@dataclass(frozen=True)
class State:
    """The activity of one rank when it was last seen."""

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
        """The last event; the start of the log if there is none."""
        began = Record(0, self.log.writer.started_ns, 0, 0, Phase.FORWARD, Mark.RESET)
        return self.log.records[-1] if self.log.records else began

    @property
    def seen_ns(self) -> int:
        """The time at which its process was last known to live, in nanoseconds since 1970."""
        beat_ns = self.log.beat.time_ns if self.log.beat is not None else 0
        return max(self.last.time_ns, beat_ns, self.log.read_ns if self.log.alive else 0)

    @property
    def is_closed(self) -> bool:
        """True if its process ended or its log was stopped, also after a failure."""
        return self.last.mark is Mark.GOODBYE

    @property
    def is_gone(self) -> bool | None:
        """True if its process died without closing its log; None if this machine cannot know."""
        return False if self.is_closed else None if self.log.alive is None else not self.log.alive

    @property
    def was_terminated(self) -> bool:
        """True if its process is dead and had received SIGTERM."""
        return bool(self.log.termination) and not self.log.alive

    @property
    def waits(self) -> bool:
        """True if the rank communicates."""
        return self.doing is Doing.WAITS

    @property
    def communication_failed(self) -> bool:
        """True if communication ended in an error, such as a timeout."""
        return self.failure is not None and self.failure.phase not in _COMPUTES

    @property
    def waits_or_failed(self) -> bool:
        """True if the rank communicates, or did so until an error."""
        return self.waits or self.communication_failed

    @property
    def own_error_ns(self) -> int | None:
        """The time of an error that did not come from communication."""
        if self.failure is not None:
            return None if self.communication_failed else self.failure.time_ns
        return self.last.time_ns if self.doing is Doing.ENDED and self.log.words else None

    @property
    def quiet_s(self) -> float:
        """Idle seconds when the rank was last seen."""
        return (self.seen_ns - self.last.time_ns) / 1e9

    @property
    def count(self) -> int:
        """The number of operations started since the start or the last reset."""
        return max(self.operations, default=0)

    # ---- in words: predicates of a sentence about the rank --------------------------------------------------------

    @property
    def phase_summary(self) -> str:
        """The phase, as a predicate."""
        assert self.phase is not None
        return _WAITING[self.phase].format(unit=self.log.writer.units[self.unit].label)

    @property
    def place_summary(self) -> str:
        """The place of its phase, such as `in the forward of step 3`."""
        assert self.phase is not None
        return where(self.last.step, self.phase, self.in_backward)

    @property
    def summary(self) -> str:
        """The activity, as a predicate."""
        if self.phase is None:
            return Doing.NOTHING_YET.value
        if self.doing is Doing.ENDED:
            return "has ended its program"
        if self.doing is Doing.FAILED:
            return f"raised an error while it {self.phase_summary}"
        if self.doing is Doing.OUTSIDE:
            last = f"{self.phase_summary}, step {self.last.step}"
            return f"runs code outside of the model (the last it did there: {last})"
        return f"{self.phase_summary} {self.place_summary}"

    @property
    def death_summary(self) -> str:
        """The end of the process, as a predicate."""
        process = self.log.writer.process
        which = f"(process {process.pid} on {process.host})"
        if self.was_terminated:
            return f"was ended by SIGTERM {which}"
        return f"died without a word {which}, as after kill -9 or when memory runs out"

    @property
    def stack_lines(self) -> tuple[str, ...]:
        """The Python stack when SIGTERM ended the process, line by line."""
        stack = self.log.termination.rpartition("(most recent call first)")[2].splitlines()
        frames = [line for line in stack if line.startswith("  File ")][:_FRAMES_SHOWN]
        return ("when SIGTERM came it ran, innermost first:", *frames) if frames else ()

    @property
    def unit_summary(self) -> tuple[str, ...]:
        """One line on the parameters of the phase's unit, if it has one."""
        has_unit = self.phase is not None and self.phase not in ON_REQUEST
        return (unit_summary(self.log.writer.units[self.unit]),) if has_unit else ()

    @property
    def process_summary(self) -> str:
        """The state of the process, in one word."""
        if self.is_closed or self.was_terminated:
            return "ended" if self.is_closed else "SIGTERM"
        return {True: "alive", False: "dead", None: "elsewhere"}[self.log.alive]


def state_of(log: RankLog) -> State:
    """Derive a rank's activity from its log."""
    if not log.records:
        return State(log, Doing.NOTHING_YET)
    open_phases: list[Record] = []  # outermost first
    failure: Record | None = None  # that was not recovered from
    operations: dict[int, Record] = {}
    for record in log.records:
        if record.mark is Mark.BEGINS:
            open_phases.append(record)
        elif record.mark is Mark.LAUNCHES:
            operations[record.counted] = record
        elif record.mark in (Mark.ENDS, Mark.FAILED):
            close_phase(open_phases, record.phase, record.unit)
            failure = failure or (record if record.mark is Mark.FAILED else None)
        elif record.mark is Mark.RESET:
            open_phases, failure, operations = [], None, {}
    over = next((record for record in reversed(log.records) if record.mark is not Mark.GOODBYE), log.records[-1])
    innermost = failure or (open_phases[-1] if open_phases else over)
    phase, unit, doing = innermost.phase, innermost.unit, Doing.OUTSIDE
    if failure is not None:  # how it ended follows from that
        doing = Doing.FAILED
    elif log.records[-1].mark is Mark.GOODBYE:
        doing = Doing.ENDED
    elif open_phases:
        doing = Doing.COMPUTES if phase in _COMPUTES else Doing.WAITS
    if doing in (Doing.OUTSIDE, Doing.COMPUTES) and log.beat is not None and log.beat.collective != NO_NUMBER:
        doing, phase, unit = Doing.WAITS, log.beat.phase, log.beat.unit
    return State(log, doing, phase, unit, innermost.in_backward, operations, failure, is_inside=bool(open_phases))


# ---- findings -------------------------------------------------------------------------------------------------------


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
    doing: str  # its activity when it was last seen, as the predicate of a sentence
    quiet_s: float  # for how long nothing had happened then
    operations: int  # how many operations it had started
    process: str  # "alive", "dead", "ended", "SIGTERM" for one that it ended, or "elsewhere" for one on another machine


@dataclass(frozen=True)
class Finding:
    """The diagnosis for the ranks that share one model: those that stand out, and why."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """The diagnosis of a run: one finding per set of ranks that share a model, a row per rank, and remarks."""

    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()

    @property
    def is_odd(self) -> bool:
        """True if any finding names a problem."""
        return any(finding.kind is not Kind.NOTHING for finding in self.findings)

    def __str__(self) -> str:
        sentences = [text for finding in self.findings for text in finding.sentences]
        rows = [
            f"  rank {row.rank}{f' model {row.model}' if row.model else ''}{' (suspect)' if row.is_odd else ''}: "
            f"{row.doing}; {row.operations} operations, quiet for {row.quiet_s:.1f} s, process {row.process}"
            for row in sorted(self.rows, key=lambda row: not row.is_odd)[:_ROWS_SHOWN]
        ]
        more = [f"  and {len(self.rows) - len(rows)} more"] if len(self.rows) > len(rows) else []
        is_before = all(row.doing == Doing.NOTHING_YET.value for row in self.rows)
        nothing = f"no rank {'has called the model yet' if is_before else 'stands out'}"
        return "\n".join([*(sentences or [nothing]), *rows, *more, *self.remarks])


def explain(logs: Logs, after_s: float) -> Explanation:
    """Diagnose a run from its logs; a rank that waits is stuck after `after_s` seconds without an event."""
    sets: dict[tuple[int, tuple[int, ...]], list[State]] = {}
    for log in logs.ranks:
        sets.setdefault((log.writer.model, log.writer.peers), []).append(state_of(log))
    findings, rows = [], []
    for (model, peers), members in sets.items():
        finding = _Ranks(peers, members, after_s).find()
        findings.append(finding)
        rows += [
            Row(s.rank, model, s.rank in finding.ranks, s.summary, s.quiet_s, s.count, s.process_summary)
            for s in members
        ]
    return Explanation(tuple(findings), tuple(rows), logs.remarks)


class _Ranks:
    """The ranks that share one model."""

    def __init__(self, peers: Sequence[int], states: Sequence[State], after_s: float) -> None:
        self.peers, self.states, self.after_s = peers, states, after_s
        self.newest_ns = max(state.seen_ns for state in states)

    def find(self) -> Finding:
        """Find the ranks that stand out; causes are tried before their consequences."""
        # Differences come before ends: back ends end a process that receives an unexpected message.
        looks = (self._missing, self._different, self._over, self._elsewhere)
        found = next((finding for look in looks if (finding := look()) is not None), Finding(Kind.NOTHING))
        return replace(found, sentences=tuple(dict.fromkeys(found.sentences)))

    def _stuck(self) -> list[State]:
        """Return the ranks that communicate and exceeded the time limit, or whose wait ended in an error."""
        return [each for each in self.states if each.communication_failed or (each.waits and self._stands_still(each))]

    def _stands_still(self, state: State) -> bool:
        """Return True if a rank had exceeded the time limit when it was last seen.

        A launcher ends the remaining ranks by SIGTERM when one has failed. If a wait had ended in an error, by whatever
        time limit, a remaining rank stood still if it was quiet for longer than clocks and heartbeats are uncertain.
        """
        is_rest = state.was_terminated and any(other.communication_failed for other in self.states)
        return state.quiet_s >= (min(self.after_s, 2 * _UNSURE_S) if is_rest else self.after_s)

    # ---- ranks that are not there -------------------------------------------------------------------------------

    def _missing(self) -> Finding | None:
        known = {state.rank for state in self.states}
        missing = tuple(rank for rank in self.peers if rank not in known)
        began_ns = max(state.log.writer.started_ns for state in self.states)
        if not missing or (self.newest_ns - began_ns) / 1e9 < self.after_s:
            return None
        text = "left no log here: never started, stopped before its model was wrapped, or writes to another folder"
        return Finding(Kind.MISSING, missing, (f"{listed(missing)} {text}", *self._summaries(self.states)))

    def _over(self) -> Finding | None:
        """Find the first ranks whose process or pass is over while others go on.

        A rank that stood still before its process died, while others waited, is reported as standing still.
        """
        stuck = self._stuck()
        raised = [(at, state) for state in self.states if (at := state.own_error_ns) is not None]
        gone = [state for state in self._gone() if not (stuck and self._stands_still(state))]
        first_raised = min((at for at, _ in raised), default=math.inf)
        first_gone = min((state.seen_ns for state in gone), default=math.inf) + _UNSURE_S * 1e9
        if raised and first_raised <= first_gone:
            return self._raised([state for at, state in raised if at == first_raised])
        if gone:
            dead = [state for state in gone if state.seen_ns <= first_gone]
            text = f"{dead[0].death_summary}; the last thing known: it {dead[0].summary}"
            return self._odd(Kind.DIED, dead, text, *dead[0].stack_lines, *dead[0].unit_summary)
        ended = [state for state in self.states if state.doing is Doing.ENDED and not state.communication_failed]
        return self._odd(Kind.ENDED, ended, "ended its program, while others go on") if ended and stuck else None

    def _gone(self) -> list[State]:
        """Return the ranks that died before the others; none if all died together.

        A rank whose communication failed first is not the cause, however it ended.
        """
        silent_s = {state.rank: (self.newest_ns - state.seen_ns) / 1e9 for state in self.states}
        if all(state.is_gone for state in self.states):
            unsuspecting = [state for state in self.states if state.failure is None]
            if 0 < len(unsuspecting) < len(self.states):  # the others still saw communication fail
                return unsuspecting
            return [state for state in self.states if silent_s[state.rank] > 2 * _UNSURE_S]
        return [
            state
            for state in self.states
            if not state.communication_failed
            and state.doing is not Doing.ENDED
            and (state.is_gone or (state.is_gone is None and silent_s[state.rank] > _SILENT_S))
        ]

    def _raised(self, odd: Sequence[State]) -> Finding:
        state = odd[0]
        place = f"outside of the model in step {state.last.step}"
        unit: tuple[str, ...] = ()
        if state.failure is not None or state.is_inside:
            # A hook of autograd fails untold, in the backward of a unit that never ends.
            place, unit = f"while it {state.phase_summary} {state.place_summary}", state.unit_summary
        words = (f"  {line}" for line in state.log.words.splitlines())
        return self._odd(Kind.RAISED, odd, f"raised an error {place}:", *words, *unit)

    # ---- ranks that do something else ---------------------------------------------------------------------------

    def _different(self) -> Finding | None:
        waiting = self._summaries([state for state in self.states if state.waits_or_failed])
        epochs: dict[int, list[int]] = {}
        for state in self.states:
            epochs.setdefault(state.last.epoch, []).append(state.rank)
        if len(epochs) > 1:
            alone = min(epochs.values(), key=len)
            text = "called reset() a different number of times than the other ranks; call it on every rank"
            finding = Finding(Kind.RESET, tuple(alone), (f"{listed(alone)} {text}", *waiting))
            return finding if self._stuck() else None
        camps = _first_mismatch(self.states)
        if not camps:
            return None
        (others, usual), *odd = sorted(camps, key=lambda camp: -len(camp[0]))
        # With equal numbers, neither side is known to be right.
        is_tie = len(others) == len(odd[0][0])
        ranks = tuple(sorted(rank for camp, _ in (camps if is_tie else odd) for rank in camp))
        if odd[0][1].kind == usual.kind:
            text = (
                f"{listed(odd[0][0])} did something else than {listed(others)} before operation {usual.counted}, the "
                "first that all logs hold"
            )
            return Finding(Kind.DIFFERENT, ranks, (text, _ADVICE))
        units = next(state for state in self.states if state.rank == others[0]).log.writer.units
        does = ", ".join(f"{subject(camp)} {operation_summary(operation, units)}" for camp, operation in odd)
        place = f"(operation {usual.counted}, {where(usual.step, usual.phase, usual.in_backward)})"
        text = f"{does} where {subject(others)} {operation_summary(usual, units)} {place}"
        unit = () if usual.phase in ON_REQUEST else (unit_summary(units[usual.unit]),)
        return Finding(Kind.DIFFERENT, ranks, (text, *unit, *waiting, _ADVICE))

    # ---- ranks that do not come ---------------------------------------------------------------------------------

    def _elsewhere(self) -> Finding | None:
        stuck = self._stuck()
        if not stuck:
            return None
        elsewhere = [state for state in self.states if not state.waits_or_failed]
        if elsewhere:
            lines = [f"rank {each.rank} {each.summary} since {each.quiet_s:.1f} s" for each in elsewhere[:4]]
            more = (f"and {len(elsewhere) - 4} more",) if len(elsewhere) > 4 else ()
            gone = {state.rank for state in self._gone()}
            dead = [each for each in elsewhere if each.rank in gone or each.was_terminated]
            ends = [f"after that rank {each.rank} {each.death_summary}" for each in dead[:4]]
            ends += dead[0].stack_lines if dead else ()
            ranks = tuple(each.rank for each in elsewhere)
            return Finding(Kind.ELSEWHERE, ranks, (*lines, *more, *ends, *self._summaries_but(ranks)))
        least = min(state.count for state in self.states)
        behind = [state for state in self.states if state.count == least]
        if len(behind) < len(self.states):
            return self._odd(Kind.BEHIND, behind, f"is behind: it {behind[0].summary}")
        if len(stuck) < len(self.states):
            return None
        text = (
            "all ranks wait for the same, and all have come: the network is slow or broken, or collectives of another "
            "library are in the way (TORCH_FR_BUFFER_SIZE=2000 has PyTorch record those)"
        )
        return Finding(Kind.EQUAL, (), (text, *self._summaries(self.states)))

    # ---- sentences ----------------------------------------------------------------------------------------------

    def _odd(self, kind: Kind, odd: Sequence[State], predicate: str, *more: str) -> Finding:
        """Make a finding from a statement about some ranks; the activity of the others is added."""
        ranks = tuple(state.rank for state in odd)
        return Finding(kind, ranks, (f"{listed(ranks)} {predicate}", *more, *self._summaries_but(ranks)))

    def _summaries_but(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return self._summaries([state for state in self.states if state.rank not in ranks])

    def _summaries(self, states: Sequence[State]) -> tuple[str, ...]:
        """Summarise the activity of ranks, and the unit of the first one that waits."""
        doing: dict[str, list[State]] = {}
        for state in states:
            doing.setdefault(state.summary, []).append(state)
        lines = []
        for what, alike in doing.items():
            number = f" (operation {alike[0].count})" if alike[0].count and alike[0].waits else ""
            quiet_s = max(state.quiet_s for state in alike)
            lines.append(f"{subject(state.rank for state in alike)} {what}{number} since {quiet_s:.1f} s")
        return (*lines, *next((state.unit_summary for state in states if state.waits_or_failed), ()))


def _first_mismatch(states: Iterable[State]) -> list[tuple[list[int], Record]]:
    """Return the sets of ranks that agree on the first operation that differs, each with that operation.

    The set with the lowest rank is first; the result is empty if the logs show no difference.
    """
    logs = {state.rank: state.operations for state in sorted(states, key=lambda each: each.rank) if state.operations}
    if len(logs) < 2:
        return []
    first = max(min(operations) for operations in logs.values())
    for number in range(first, max(max(operations) for operations in logs.values()) + 1):
        # Hashes differ even if the records that differ were overwritten.
        camps: dict[object, tuple[list[int], Record]] = {}
        for rank, operations in logs.items():
            if number in operations:
                operation = operations[number]
                camps.setdefault((operation.kind, operation.hash), ([], operation))[0].append(rank)
        if len(camps) > 1:
            return list(camps.values())
    return []


# ---- words -----------------------------------------------------------------------------------------------------------


def listed(ranks: Iterable[int]) -> str:
    """Name some ranks: `rank 3`, or `ranks 0, 1, 4-7`."""
    every = sorted(ranks)
    parts = []
    for _, numbered in groupby(enumerate(every), key=lambda pair: pair[1] - pair[0]):  # equal in a row
        row = [rank for _, rank in numbered]
        parts.append(f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)))
    return f"rank{'s' if len(every) > 1 else ''} {', '.join(parts)}"


def subject(ranks: Iterable[int]) -> str:
    """Name some ranks in front of a verb in the singular."""
    text = listed(ranks)
    return f"each of {text}" if text.startswith("ranks") else text


def where(step: int, phase: Phase, in_backward: bool) -> str:
    """Name the place of an event, such as `in the forward of step 3`; steps count from 0, as optimizer steps do."""
    if not in_backward and phase in _BETWEEN:
        return f"in step {step}"
    return f"in the {'backward' if in_backward else 'forward'} of step {step}"


def operation_summary(operation: Record, units: Sequence[UnitFacts]) -> str:
    """Describe an operation as the predicate of a sentence about one rank."""
    size = f" ({operation.num_bytes} bytes)" if operation.num_bytes else ""
    return _WAITING[operation.phase].format(unit=units[operation.unit].label) + size


def unit_summary(unit: UnitFacts) -> str:
    """Describe the parameters of a unit."""
    names = unit.parameters
    more = f" and {len(names) - _PARAMETERS_SHOWN} more" if len(names) > _PARAMETERS_SHOWN else ""
    shown = ", ".join(names[:_PARAMETERS_SHOWN]) or "no parameters"
    count = f"{len(names)} parameter{'s' if len(names) != 1 else ''}"
    return f"{unit.label} holds {shown}{more} ({count}, {unit.num_bytes} bytes)"
