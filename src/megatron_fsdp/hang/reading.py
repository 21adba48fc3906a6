"""The logs of a folder, and what each rank was doing. What cannot be read is left out, with a remark."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.log_file import (
    NO_NUMBER,
    Mark,
    RankLog,
    Record,
    parse_log,
    rank_and_model,
)

_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Logs:
    """The logs of the newest run in a folder, by model, then by rank; what was left out and why."""

    ranks: tuple[RankLog, ...]
    remarks: tuple[str, ...] = ()


def read_log(path: Path) -> RankLog:
    """Read one log.

    Raises:
        ValueError: The file is none, or damaged; says how.
        OSError: It cannot be read.
    """
    log = parse_log(_content(path))
    alive = log.writer.process.is_alive
    if alive is False:  # again, since only now it is the last
        log = parse_log(_content(path))
    return replace(log, alive=alive, read_ns=time.time_ns())


def _content(path: Path) -> bytes:
    """Read all of a regular file; a pipe or a device could block, or never end."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return path.read_bytes()


def read_folder(folder: Path, run: str | None = None) -> Logs:
    """Read the logs of one run in a folder; None: of the newest run.

    Raises:
        ConfigurationError: There is no such folder, or no log of the run that can be read in it.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder; give the one that MFSDP_HANG_LOG or log_for_hangs named")
    found: list[RankLog] = []
    remarks: list[str] = []
    for path in sorted(folder.iterdir()):
        if rank_and_model(path.name) is not None:
            try:
                found.append(read_log(path))
            except (ValueError, OSError) as error:
                remarks.append(f"{path.name} was left out: {error}")
    if not found:
        told = f" ({'; '.join(remarks)})" if remarks else ""
        raise ConfigurationError(
            f"{folder} holds no log of a rank{told}; train with MFSDP_HANG_LOG={folder}, or call "
            "model.log_for_hangs(folder) on every rank"
        )
    run = run or max(found, key=lambda log: log.writer.started_ns).writer.run
    ranks = sorted((log for log in found if log.writer.run == run), key=lambda log: (log.writer.model, log.writer.rank))
    if not ranks:
        raise ConfigurationError(f"{folder} holds logs of other runs only; give each job its own folder")
    # SIGTERM is noted in the newest log of a process only.
    terminations = {log.writer.process: log.termination for log in ranks if log.termination}
    others = sorted({log.writer.rank for log in found if log.writer.run != run})
    if others:
        remarks.append(f"logs of rank {', '.join(map(str, others))} are of other runs and were left out")
    return Logs(
        tuple(replace(log, termination=terminations.get(log.writer.process, "")) for log in ranks), tuple(remarks)
    )


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


def _operations(records: Sequence[Record]) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for record in records:
        if record.mark is Mark.RESET:
            found.clear()
        elif record.mark is Mark.LAUNCHES:
            found[record.counted] = record
    return found
