"""A ring log: an observer that keeps what one rank did last in a memory-mapped file, for whoever explains a hang.

The pages belong to the operating system, so they are there after `kill -9`, and others may read them at any time. An
event costs one packed record of 64 bytes.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.lanes import Moment
from megatron_fsdp.runtime.observer import Observer, Phase
from megatron_fsdp.runtime.ring_format import (
    NO_NUMBER,
    Beat,
    Mark,
    new_file,
    write_beat,
    write_record,
    write_words,
)
from megatron_fsdp.runtime.rolling_hash import fold
from megatron_fsdp.runtime.wire_bytes import communicated_bytes
from megatron_fsdp.unit.unit import Unit

RECORDS = 4096
PHASES = tuple(Phase)
_NUMBER_OF = {phase: number for number, phase in enumerate(PHASES)}
_MEETINGS = frozenset({Phase.AGREE, Phase.NORM, Phase.WHOLE})  # they communicate beside the lanes
_MOST_HANDLES = 1024
_FRAMES_SHOWN = 4


class Ring:
    """The file.

    Args:
        path: Where; what is there is replaced.
        who: What to know about the writer; JSON.
        capacity: Records to hold.

    Attributes:
        path: As given.
        written: Records so far.
        last_ns: When the last one was written; when the file was made, before the first.
        fails: Whether an error is what its last words tell of.
    """

    def __init__(self, path: Path, who: Mapping[str, Any], capacity: int = RECORDS) -> None:
        content, self._places = new_file(who, capacity)
        self.path = path
        self.written = 0
        self.last_ns = time.time_ns()
        self.fails = False
        self._pid = os.getpid()
        self._last: tuple[int, ...] = (0, NO_NUMBER, 0, 0, 0, 0)
        # A reader of what was there keeps its pages, and none ever sees half a header.
        beside = path.with_name(f"{path.name}.{self._pid}")
        beside.write_bytes(content)
        with beside.open("r+b") as file:
            self._memory: mmap.mmap | None = mmap.mmap(file.fileno(), 0)
        beside.replace(path)

    def note_terminations(self) -> None:
        """From now on append Python's stack to the file when SIGTERM comes, before whatever that does here.

        At once, also while this process waits in a collective, where a handler in Python would have to wait too, and
        would keep the process from ending. Of several logs of a process the last that asked gets it. A handler that
        somebody installs later replaces this one.
        """
        if hasattr(faulthandler, "register"):  # not on Windows
            file = self.path.open("ab", buffering=0)  # kept open by what it is given to
            faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)
            os.register_at_fork(after_in_child=_forget_terminations)

    def add(self, mark: Mark, phase: int, unit: int, in_backward: bool, *after: int) -> None:
        """Write a record.

        Args:
            mark: What of the phase.
            phase: Which.
            unit: Of which unit.
            in_backward: Whether autograd runs.
            after: Step, collective, bytes, count, hash and epoch.
        """
        if self._memory is None:
            return
        step, collective, num_bytes, count, hashed, epoch = after
        record = (
            self.written,
            time.time_ns(),
            step,
            unit,
            phase,
            mark,
            in_backward,
            collective,
            num_bytes,
            count,
            hashed,
            epoch,
        )
        write_record(self._memory, self._places, record)
        self.written += 1
        self.last_ns = record[1]
        self._last = after

    def beat(self, beat: Beat) -> None:
        """Give a sign of life."""
        if self._memory is not None:
            write_beat(self._memory, self._places, beat)

    def say(self, error: BaseException) -> None:
        """Leave an error as the last words."""
        if self._memory is not None:
            self.fails = True
            write_words(self._memory, self._places, told(error))

    def close(self) -> None:
        """Say goodbye, with the error that ends the process if one does; later events are not written."""
        if self._memory is None or os.getpid() != self._pid:  # a forked child shares the pages and says nothing
            return
        # Set by the interpreter when nobody has caught the error.
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not self.fails:
            self.say(error)
        self.add(Mark.GOODBYE, 0, 0, False, *self._last)
        self._memory = None  # not closed: another thread may be writing a sign of life


class RingLog(Observer):
    """Writes what it is told into a ring; says goodbye when it goes, or the process does.

    Args:
        ring: The file.
        units: All units, root first.
        keeps_handles: Whether the host goes on before a collective is complete, as on accelerators; its handle then
            says whether it is.
    """

    def __init__(self, ring: Ring, units: Sequence[Unit], keeps_handles: bool) -> None:
        self.ring = ring
        self._units = units
        self._keeps_handles = keeps_handles
        self._open: list[tuple[Phase, int, bool]] = []  # phase, unit, and whether it has been counted
        self._step = self._count = self._hash = self._epoch = 0
        self._collective = NO_NUMBER
        self._error = 0  # identity of the one that was told last: it passes through many phases
        self._handles: deque[tuple[dist.Work, int, int, int]] = deque(maxlen=_MOST_HANDLES)
        self.close = weakref.finalize(self, ring.close)

    @property
    def is_open(self) -> bool:
        """Whether a phase is under way."""
        return bool(self._open)

    def begins(self, phase: Phase, unit: int) -> None:
        """As `Observer`."""
        self._step += phase is Phase.INSTALL
        self._open.append((phase, unit, False))
        self._add(Mark.BEGINS, phase, unit)
        if phase in _MEETINGS:
            self._communicate()

    def ends(self, phase: Phase, unit: int) -> None:
        """As `Observer`."""
        self._leave(phase, unit)
        self._add(Mark.ENDS, phase, unit)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:
        """As `Observer`. An error that passes through several phases is told of where it was raised."""
        self._leave(phase, unit)
        if id(error) == self._error:
            self._add(Mark.ENDS, phase, unit)
            return
        self._error = id(error)
        self.ring.say(error)
        self._add(Mark.FAILED, phase, unit)

    def forgets(self) -> None:
        """As `Observer`."""
        self._open.clear()
        self._handles.clear()
        self._error = self._count = self._hash = 0  # ranks may have been stopped at different points
        self._epoch = (self._epoch + 1) % 256
        self.ring.fails = False
        self._add(Mark.RESET, Phase.FORWARD, 0)

    def communicates(self, number: int, moment: Moment, lane: str, work: dist.Work | None) -> None:  # noqa: ARG002
        """As `Observer`."""
        if moment is Moment.LAUNCHES:
            self._collective = number
            self._communicate()
        elif moment is Moment.LAUNCHED and work is not None and self._keeps_handles and self._open:
            phase, unit, _ = self._open[-1]
            self._handles.append((work, number, unit, _NUMBER_OF[phase]))

    def beat(self) -> Beat:
        """Give a sign of life, with the collective that has been unfinished longest. For a thread of its own."""
        while self._handles and self._handles[0][0].is_completed():
            self._handles.popleft()
        now = time.time_ns()
        beat = Beat(now)
        for _, number, unit, phase in list(self._handles)[:1]:
            beat = Beat(now, number, unit, phase)
        self.ring.beat(beat)
        return beat

    def _communicate(self) -> None:
        """The innermost phase starts to communicate; counted once, however many collectives it takes."""
        if not self._open or self._open[-1][2]:
            return
        phase, unit, _ = self._open[-1]
        self._open[-1] = phase, unit, True
        num_bytes = communicated_bytes(phase, self._units[unit])
        self._count += 1
        self._hash = fold(self._hash, _NUMBER_OF[phase], unit, num_bytes)
        self._add(Mark.LAUNCHES, phase, unit, num_bytes)

    def _leave(self, phase: Phase, unit: int) -> None:
        """A phase is over, and with it those inside of it that were never ended."""
        for place in reversed(range(len(self._open))):
            if self._open[place][:2] == (phase, unit):
                del self._open[place:]
                return

    def _add(self, mark: Mark, phase: Phase, unit: int, num_bytes: int = 0) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        after = self._step, self._collective, num_bytes, self._count, self._hash, self._epoch
        self.ring.add(mark, _NUMBER_OF[phase], unit, in_backward, *after)


def _forget_terminations() -> None:
    faulthandler.unregister(signal.SIGTERM)


def told(error: BaseException) -> str:
    """An error in words: its type and message, and the last lines of code it came through, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    where = [f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    return "\n".join([*where, "".join(traceback.format_exception_only(type(error), error)).strip()])
