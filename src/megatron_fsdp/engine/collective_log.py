"""A ring log: an observer that writes this rank's latest events to a memory-mapped file, to explain a hang.

The pages belong to the operating system, so they survive `kill -9`, and others may read them at any time. An event
costs one packed record of 64 bytes.
"""

from __future__ import annotations

import faulthandler
import json
import math
import mmap
import os
import signal
import struct
import sys
import time
import traceback
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.comm.lanes import Moment
from megatron_fsdp.engine.executor import communicated_bytes
from megatron_fsdp.engine.observer import Observer, Phase
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError

# The file of a ring log:
#
#     0       magic, version, sizes (`_HEAD`), and a checksum over the text that follows
#     64      the writer: JSON, padded to a multiple of 64 bytes
#     ...     the heartbeat (`_BEAT`), padded to 64 bytes
#     ...     the last error: 4 bytes of length, 4 of checksum, then UTF-8
#     ...     the ring: records of 64 bytes; record number n lies at place n modulo their count
#     ...     after the end: what `faulthandler` appends for each SIGTERM: the stack of Python at that moment
#
# All numbers are little-endian. Each record ends with a checksum over its other bytes, so that a half-written one is
# recognised.

MAGIC = b"MFSDPLOG"
VERSION = 1
SUFFIX = ".mfsdplog"
WORDS_BYTES = 4096
NO_NUMBER = -1
"""A collective's number where there is none."""

_ALIGN = 64
_HEAD = struct.Struct("<8sIIIII")  # magic, version, length of the text, its checksum, records, bytes of a record
_BEAT = struct.Struct("<qqiB3xI")  # time, unfinished collective, its unit, its phase, checksum
_WORDS = struct.Struct("<II")
_RECORD = struct.Struct("<QqIiBBBBqQQQ")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
assert RECORD_BYTES == _ALIGN


_LIMIT = 2**61 - 1  # a Mersenne prime; sums and differences fit into int64
_FACTOR = 1_000_003


def fold(so_far: int, operation: int, unit: int, num_bytes: int) -> int:
    """Hash a sequence with one more operation: a polynomial in the operations, modulo 2 ** 61 - 1.

    Ranks compare such hashes to find out whether they did the same.

    Args:
        so_far: The hash before it; 0 for an empty sequence.
        operation: Number of the operation, 0 or more.
        unit: Index of the unit, 0 or more.
        num_bytes: Its bytes.
    """
    for part in (operation, unit, num_bytes):
        so_far = (so_far * _FACTOR + part + 1) % _LIMIT
    return so_far


class Mark(IntEnum):
    """The kind of an event."""

    BEGINS = 0
    ENDS = 1
    LAUNCHES = 2  # the phase has started to communicate; counted, and folded into the hash
    FAILED = 3  # it raised an exception
    RESET = 4  # the model was reset after an exception
    GOODBYE = 5  # the process ends, or the log is closed


@dataclass(frozen=True)
class Record:
    """One event on one rank.

    Attributes:
        number: Its number, from 0.
        time_ns: Nanoseconds since 1970 by this rank's clock.
        step: How many times weights had been installed.
        unit: The unit's index.
        phase: Index of the phase in the log's list of phases.
        mark: Kind of the event.
        in_backward: Whether autograd ran.
        collective: Number of the collective that was launched last; `NO_NUMBER` before the first.
        num_bytes: What the phase communicates, in bytes; 0 for phases that send a few numbers.
        count: How many phases have communicated, this one included.
        hash: Over (phase, unit, bytes) of all of these.
        epoch: How often the model was reset, modulo 256; `count` and `hash` restart each time.
    """

    number: int
    time_ns: int
    step: int
    unit: int
    phase: int
    mark: Mark
    in_backward: bool
    collective: int
    num_bytes: int
    count: int
    hash: int
    epoch: int = 0


@dataclass(frozen=True)
class Beat:
    """A heartbeat, written about once a second by a thread of its own.

    Attributes:
        time_ns: Nanoseconds since 1970.
        unfinished: Number of the oldest collective that an accelerator has not completed; `NO_NUMBER`: none, or the
            host waits for collectives itself, so that records show it.
        unit: Unit of that collective.
        phase: Index of the phase that launched it.
    """

    time_ns: int
    unfinished: int = NO_NUMBER
    unit: int = 0
    phase: int = 0


@dataclass(frozen=True)
class Places:
    """The offsets of the parts of a file, in bytes.

    Attributes:
        beat: The heartbeat.
        words: The last error.
        ring: The first record.
        capacity: Records in the ring.
    """

    beat: int
    words: int
    ring: int
    capacity: int

    @property
    def end(self) -> int:
        """Bytes of the whole file."""
        return self.ring + self.capacity * RECORD_BYTES

    def record(self, number: int) -> int:
        """Return the offset of record `number`."""
        return self.ring + number % self.capacity * RECORD_BYTES


def _padded(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _places(text_bytes: int, capacity: int) -> Places:
    beat = _ALIGN + _padded(text_bytes)
    words = beat + _ALIGN
    return Places(beat, words, words + WORDS_BYTES, capacity)


def new_file(who: Mapping[str, Any], capacity: int) -> tuple[bytes, Places]:
    """Return the bytes of a log without records, and the offsets of its parts.

    Args:
        who: Facts about the writer; JSON.
        capacity: Records to hold, at least 1.
    """
    text = json.dumps(who, ensure_ascii=False).encode()
    places = _places(len(text), capacity)
    content = bytearray(places.end)
    _HEAD.pack_into(content, 0, MAGIC, VERSION, len(text), zlib.crc32(text), capacity, RECORD_BYTES)
    content[_ALIGN : _ALIGN + len(text)] = text
    return bytes(content), places


def read_head(content: bytes) -> tuple[dict[str, Any], Places]:
    """Read the facts about the writer of a log, and the offsets of its parts.

    Raises:
        ValueError: It is no log, one of another version, or damaged; says which.
    """
    if len(content) < _ALIGN or content[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin as a log does")
    _, version, length, check, capacity, record_bytes = _HEAD.unpack_from(content)
    if version != VERSION or record_bytes != RECORD_BYTES:
        raise ValueError(f"it has version {version}, and this program reads version {VERSION}")
    text = content[_ALIGN : _ALIGN + length]
    if len(text) < length or zlib.crc32(text) != check or not capacity:
        raise ValueError("its header is damaged or cut off")
    who = json.loads(text)
    if not isinstance(who, dict):
        raise ValueError("its header says nothing of the writer")
    return who, _places(length, capacity)


def write_record(memory: Any, places: Places, record: tuple[int, ...]) -> None:
    """Write a record into its place.

    Args:
        memory: The file, writable.
        places: The offsets of its parts.
        record: The fields of `Record`, in order; a bare tuple, because this runs for every event.
    """
    packed = _RECORD.pack(*record[:7], record[11], *record[7:11])
    at = places.record(record[0])
    memory[at : at + RECORD_BYTES] = packed + _CHECK.pack(zlib.crc32(packed))


def read_records(content: bytes, places: Places) -> tuple[list[Record], int]:
    """Return all intact records, in order, and the number of places that hold something else.

    A place that was never written is not counted; one that was being overwritten is, as is a record in a wrong place.
    """
    found: list[Record] = []
    torn = 0
    for place in range(places.capacity):
        at = places.ring + place * RECORD_BYTES
        raw = content[at : at + RECORD_BYTES]
        if not any(raw):
            continue
        record = _record(raw)
        if record is None or record.number % places.capacity != place:
            torn += 1
        else:
            found.append(record)
    found.sort(key=lambda record: record.number)
    newest = found[-1].number if found else 0
    recent = [record for record in found if record.number > newest - places.capacity]
    return recent, torn + len(found) - len(recent)


def _record(raw: bytes) -> Record | None:
    if len(raw) < RECORD_BYTES or _CHECK.unpack_from(raw, _RECORD.size)[0] != zlib.crc32(raw[: _RECORD.size]):
        return None
    number, time_ns, step, unit, phase, mark, back, epoch, collective, num_bytes, count, hashed = _RECORD.unpack_from(
        raw
    )
    try:
        known = Mark(mark)
    except ValueError:
        return None
    return Record(number, time_ns, step, unit, phase, known, bool(back), collective, num_bytes, count, hashed, epoch)


def write_beat(memory: Any, places: Places, beat: Beat) -> None:
    """Write a heartbeat."""
    packed = _BEAT.pack(beat.time_ns, beat.unfinished, beat.unit, beat.phase, 0)
    packed = packed[:-4] + _CHECK.pack(zlib.crc32(packed[:-4]))
    memory[places.beat : places.beat + _BEAT.size] = packed


def read_beat(content: bytes, places: Places) -> Beat | None:
    """Read the last heartbeat; None where there is none, or it was being written."""
    raw = content[places.beat : places.beat + _BEAT.size]
    if len(raw) < _BEAT.size:
        return None
    time_ns, unfinished, unit, phase, check = _BEAT.unpack(raw)
    return Beat(time_ns, unfinished, unit, phase) if time_ns and check == zlib.crc32(raw[:-4]) else None


def write_words(memory: Any, places: Places, text: str) -> None:
    """Write the last error; of a text that is too long the end is kept, since it names the error."""
    said = text.encode("utf-8", "backslashreplace")[-(WORDS_BYTES - _WORDS.size) :]
    at = places.words + _WORDS.size
    memory[at : at + len(said)] = said
    memory[places.words : at] = _WORDS.pack(len(said), zlib.crc32(said))


def read_words(content: bytes, places: Places) -> str:
    """Read the last error; empty where there is none, or it was being written."""
    if len(content) < places.ring:
        return ""
    length, check = _WORDS.unpack_from(content, places.words)
    said = content[places.words + _WORDS.size :][: min(length, WORDS_BYTES)]
    return said.decode("utf-8", "replace") if said and zlib.crc32(said) == check else ""


def read_termination(content: bytes, places: Places) -> str:
    """Read Python's stack at the last SIGTERM, as `faulthandler` wrote it; empty where none came."""
    return content[places.end :].decode("utf-8", "replace").strip()[-WORDS_BYTES:]


FOLDER_VARIABLE = "MFSDP_HANG_LOG"
TIMEOUT_VARIABLE = "MFSDP_HANG_TIMEOUT"


@dataclass(frozen=True)
class HangSettings:
    """Settings of a log for hangs.

    Attributes:
        folder: Where the ranks keep their logs; one that all of them see, where there is one.
        timeout_s: Report when a phase has taken this many seconds without news; None: only when asked.
    """

    folder: Path
    timeout_s: float | None = None


def check_timeout(timeout_s: float | None, name: str = "timeout_s") -> None:
    """Refuse times that are no time.

    Raises:
        ConfigurationError: Not positive, or not finite.
    """
    if timeout_s is not None and not (timeout_s > 0.0 and math.isfinite(timeout_s)):
        raise ConfigurationError(f"{name}={timeout_s!r} is no time to wait; give seconds, more than 0")


def resolve_hang_log(environment: Mapping[str, str] = os.environ) -> HangSettings | None:
    """Read the settings from the environment; None: keep no log.

    Args:
        environment: Environment variables, of which `MFSDP_HANG_LOG` names a folder and `MFSDP_HANG_TIMEOUT` seconds.

    Raises:
        ConfigurationError: The time is no positive number, or there is one without a folder.
    """
    folder, seconds = environment.get(FOLDER_VARIABLE, ""), environment.get(TIMEOUT_VARIABLE, "")
    if not folder:
        if seconds:
            raise ConfigurationError(
                f"{TIMEOUT_VARIABLE}={seconds} has no effect without {FOLDER_VARIABLE}; name a folder for the logs too"
            )
        return None
    timeout_s = None
    if seconds:
        try:
            timeout_s = float(seconds)
        except ValueError:
            timeout_s = math.nan
        if not (timeout_s > 0.0 and math.isfinite(timeout_s)):
            raise ConfigurationError(f"{TIMEOUT_VARIABLE}={seconds!r} is no time to wait; give seconds, more than 0")
    return HangSettings(Path(folder), timeout_s)


RECORDS = 4096
PHASES = tuple(Phase)
_NUMBER_OF = {phase: number for number, phase in enumerate(PHASES)}
_MEETINGS = frozenset({Phase.AGREE, Phase.NORM, Phase.WHOLE})  # they communicate beside the lanes
_MOST_HANDLES = 1024
_FRAMES_SHOWN = 4


class Ring:
    """The file of a ring log.

    Args:
        path: Where; an existing file is replaced.
        who: Facts about the writer; JSON.
        capacity: Records to hold.

    Attributes:
        path: As given.
        written: Records so far.
        last_ns: When the last one was written; when the file was made, before the first.
        fails: Whether an error was written.
    """

    def __init__(self, path: Path, who: Mapping[str, Any], capacity: int = RECORDS) -> None:
        content, self._places = new_file(who, capacity)
        self.path = path
        self.written = 0
        self.last_ns = time.time_ns()
        self.fails = False
        self._pid = os.getpid()
        self._last: tuple[int, ...] = (0, NO_NUMBER, 0, 0, 0, 0)
        # Renamed into place: a reader of an old file keeps its pages, and none ever sees half a header.
        beside = path.with_name(f"{path.name}.{self._pid}")
        beside.write_bytes(content)
        with beside.open("r+b") as file:
            self._memory: mmap.mmap | None = mmap.mmap(file.fileno(), 0)
        beside.replace(path)

    def note_terminations(self) -> None:
        """Append Python's stack to the file when SIGTERM comes, before what SIGTERM does otherwise.

        It works while this process waits in a collective, where a handler in Python would have to wait too, and would
        keep the process from ending. Of several logs of a process the last that asked gets it. A handler that is
        installed later replaces this one.
        """
        if hasattr(faulthandler, "register"):  # not on Windows
            file = self.path.open("ab", buffering=0)  # `faulthandler` keeps it open
            faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)
            os.register_at_fork(after_in_child=_forget_terminations)

    def add(self, mark: Mark, phase: int, unit: int, in_backward: bool, *after: int) -> None:
        """Write a record.

        Args:
            mark: Kind of the event.
            phase: Index of the phase.
            unit: Index of the unit.
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
        """Write a heartbeat."""
        if self._memory is not None:
            write_beat(self._memory, self._places, beat)

    def say(self, error: BaseException) -> None:
        """Write an error as the last one."""
        if self._memory is not None:
            self.fails = True
            write_words(self._memory, self._places, told(error))

    def close(self) -> None:
        """Write the last record, and the error that ends the process if one does; later events are not written."""
        if self._memory is None or os.getpid() != self._pid:  # a forked child shares the pages and must not write
            return
        # Set by the interpreter for an uncaught error.
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not self.fails:
            self.say(error)
        self.add(Mark.GOODBYE, 0, 0, False, *self._last)
        self._memory = None  # not closed: another thread may be writing a heartbeat


class RingLog(Observer):
    """An observer that writes a ring; it closes the ring when it is deleted or the process ends.

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
        self._error = 0  # id of the last error written: it passes through many phases
        self._handles: deque[tuple[dist.Work, int, int, int]] = deque(maxlen=_MOST_HANDLES)
        self.close = weakref.finalize(self, ring.close)

    @property
    def is_open(self) -> bool:
        """Whether a phase is running."""
        return bool(self._open)

    def begins(self, phase: Phase, unit: int) -> None:
        """Write that a phase begins."""
        self._step += phase is Phase.INSTALL
        self._open.append((phase, unit, False))
        self._add(Mark.BEGINS, phase, unit)
        if phase in _MEETINGS:
            self._communicate()

    def ends(self, phase: Phase, unit: int) -> None:
        """Write that a phase has ended."""
        self._leave(phase, unit)
        self._add(Mark.ENDS, phase, unit)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:
        """Write that a phase has failed. An error that passes through several phases belongs to the innermost."""
        self._leave(phase, unit)
        if id(error) == self._error:
            self._add(Mark.ENDS, phase, unit)
            return
        self._error = id(error)
        self.ring.say(error)
        self._add(Mark.FAILED, phase, unit)

    def forgets(self) -> None:
        """Write a reset, and restart count and hash."""
        self._open.clear()
        self._handles.clear()
        self._error = self._count = self._hash = 0  # ranks may have been stopped at different points
        self._epoch = (self._epoch + 1) % 256
        self.ring.fails = False
        self._add(Mark.RESET, Phase.FORWARD, 0)

    def communicates(self, number: int, moment: Moment, lane: str, work: dist.Work | None) -> None:  # noqa: ARG002
        """Count a launch, and keep the handle of a collective that the host does not wait for."""
        if moment is Moment.LAUNCHES:
            self._collective = number
            self._communicate()
        elif moment is Moment.LAUNCHED and work is not None and self._keeps_handles and self._open:
            phase, unit, _ = self._open[-1]
            self._handles.append((work, number, unit, _NUMBER_OF[phase]))

    def beat(self) -> Beat:
        """Write a heartbeat, with the oldest unfinished collective. For a thread of its own."""
        while self._handles and self._handles[0][0].is_completed():
            self._handles.popleft()
        now = time.time_ns()
        beat = Beat(now)
        for _, number, unit, phase in list(self._handles)[:1]:
            beat = Beat(now, number, unit, phase)
        self.ring.beat(beat)
        return beat

    def _communicate(self) -> None:
        """Record that the innermost phase communicates; counted once, however many collectives it takes."""
        if not self._open or self._open[-1][2]:
            return
        phase, unit, _ = self._open[-1]
        self._open[-1] = phase, unit, True
        num_bytes = communicated_bytes(phase, self._units[unit])
        self._count += 1
        self._hash = fold(self._hash, _NUMBER_OF[phase], unit, num_bytes)
        self._add(Mark.LAUNCHES, phase, unit, num_bytes)

    def _leave(self, phase: Phase, unit: int) -> None:
        """Remove a phase, and those inside of it that were never ended."""
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
    """Format an error: the last lines of code it came through, innermost last, then its type and message."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    where = [f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    return "\n".join([*where, "".join(traceback.format_exception_only(type(error), error)).strip()])
