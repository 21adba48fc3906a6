"""The log of one rank: a file mapped into memory that holds its latest events, to explain a hang.

The pages belong to the operating system, so they survive `kill -9`, and others may read them at any time. An event
costs one packed record of 64 bytes, little-endian. The parts of the file:

    a line of JSON: who writes, and how many records there are
    the heartbeat: a record
    the last error: UTF-8, filled up with zeros
    the ring: record number n lies at place n modulo their count
    after the end: what `faulthandler` appends for each SIGTERM: the stack of Python at that moment

Each record ends with a checksum over its other bytes, so that a half-written one is recognised.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import signal
import struct
import sys
import time
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_fsdp.comm.processes import Process
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import ConfigurationError

SUFFIX = ".mfsdplog"
RECORD_BYTES = 64
WORDS_BYTES = 4096
RECORDS = 4096
NO_NUMBER = -1
"""The number of no collective."""

_BEGIN = b'{"mfsdp_hang_log":'
_VERSION = 3
_RECORD = struct.Struct("<QqIiBBBBqQQQ")
_CHECKED = struct.Struct(_RECORD.format + "I")
_PHASES = tuple(Phase)
_PHASE_NAMES = [phase.value for phase in Phase]
_NUMBER_OF = {phase: number for number, phase in enumerate(_PHASES)}
_FRAMES_SHOWN = 4
_MOST_BYTES = 1 << 28  # of a file that is read as a log
_NAME = re.compile(r"rank-(\d{5,})(?:\.model-(\d+))?" + re.escape(SUFFIX))


class Mark(IntEnum):
    """The kind of an event."""

    BEGINS = 0
    ENDS = 1
    LAUNCHES = 2  # the phase has started to communicate; counted, and folded into the hash
    FAILED = 3  # it raised an exception
    RESET = 4  # the model was reset after an exception
    GOODBYE = 5  # the process ends, or the log is closed
    BEAT = 6  # a heartbeat, which stands outside of the ring


class Record(NamedTuple):
    """One event on one rank."""

    number: int
    time_ns: int  # nanoseconds since 1970 by this rank's clock
    step: int  # how many times weights had been installed
    unit: int
    phase: Phase
    mark: Mark
    in_backward: bool = False  # whether autograd ran
    epoch: int = 0  # how often the model was reset, modulo 256; `counted` and `hash` restart each time
    # number of the collective that was launched last, `NO_NUMBER` before the first. In a heartbeat, the oldest
    # collective that an accelerator has not completed, by `phase` of `unit`; `NO_NUMBER`: none, or the host waits for
    # collectives itself, so that events show it
    collective: int = NO_NUMBER
    num_bytes: int = 0  # bytes that the phase communicates; 0 for phases that send a few numbers
    counted: int = 0  # how many phases have communicated, this one included
    hash: int = 0  # over (phase, unit, bytes) of all of these

    @property
    def kind(self) -> tuple[Phase, int, int]:
        """The fields that must be equal on all ranks."""
        return self.phase, self.unit, self.num_bytes


def fold(so_far: int, phase: Phase, unit: int, num_bytes: int) -> int:
    """Append one operation to the hash of a sequence: a polynomial in the operations, modulo the prime 2 ** 61 - 1.

    Ranks compare these hashes to see whether they ran the same operations; the empty sequence has 0.
    """
    for part in (_NUMBER_OF[phase], unit, num_bytes):
        so_far = (so_far * 1_000_003 + part + 1) % (2**61 - 1)
    return so_far


# ---- who writes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitFacts:
    """The facts about a unit that messages show."""

    label: str
    parameters: tuple[str, ...]  # canonical names of its parameters
    num_bytes: int  # of all its parameters on one rank that holds them whole, as they are computed with


@dataclass(frozen=True)
class Writer:
    """The author of a log."""

    rank: int
    peers: tuple[int, ...]  # global ranks that share the model's parameters, itself included
    model: int  # which model of the process, from 0
    run: str  # name of the run, the same on all its ranks and never used again
    started_ns: int  # when the log was begun, in nanoseconds since 1970
    process: Process
    units: tuple[UnitFacts, ...]  # all units, root first


def file_name(rank: int, model: int) -> str:
    """Return the file name of a model's log on a rank; the first model of a process needs no number."""
    return f"rank-{rank:05d}{f'.model-{model}' if model else ''}{SUFFIX}"


def rank_and_model(name: str) -> tuple[int, int] | None:
    """Parse rank and model from a log's file name; None for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankLog:
    """The latest records of one rank."""

    writer: Writer
    records: tuple[Record, ...]  # the last ones, oldest first
    beat: Record | None = None  # the last heartbeat; None: there was none
    words: str = ""  # the last error that was logged; empty: none
    termination: str = ""  # the Python stack at the last SIGTERM; empty: none came
    alive: bool | None = None  # whether the process runs; None: it is on another machine
    read_ns: int = 0  # when it was read, in nanoseconds since 1970


def parse_log(content: bytes) -> RankLog:
    """Parse the content of a log, without a half-written record.

    Raises:
        ValueError: It is no log, of another version, or damaged.
    """
    if not content.startswith(_BEGIN):
        raise ValueError("it does not begin as a log does")
    head, _, body = content.partition(b"\n")
    try:
        about: Mapping[str, Any] = json.loads(head)
        if (about["mfsdp_hang_log"], about["phases"]) != (_VERSION, _PHASE_NAMES):
            raise ValueError("another version of this package wrote it; read it with that one")
        writer, capacity = _writer(about["writer"]), int(about["records"])
    except json.JSONDecodeError:
        raise ValueError("its header is damaged or cut off") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is incomplete ({error})") from None
    ring, end = RECORD_BYTES + WORDS_BYTES, _size(capacity)
    if capacity < 1 or len(body) < end:
        raise ValueError("it was cut off")
    whole = (_record(body, ring + place * RECORD_BYTES, writer) for place in range(capacity))
    found = [record for place, record in enumerate(whole) if record is not None and record.number % capacity == place]
    newest = max((record.number for record in found), default=0)
    return RankLog(
        writer,
        tuple(sorted(record for record in found if record.number > newest - capacity)),
        _record(body, 0, writer),
        body[RECORD_BYTES:ring].partition(b"\0")[0].decode("utf-8", "replace"),
        body[end:].decode("utf-8", "replace").strip()[-WORDS_BYTES:],
    )


def _writer(given: Mapping[str, Any]) -> Writer:
    units = (UnitFacts(**{**unit, "parameters": tuple(unit["parameters"])}) for unit in given["units"])
    known = {"peers": tuple(given["peers"]), "process": Process(**given["process"]), "units": tuple(units)}
    return Writer(**{**given, **known})


def _size(capacity: int) -> int:
    """Return the size of heartbeat, error and ring in bytes."""
    return RECORD_BYTES + WORDS_BYTES + capacity * RECORD_BYTES


def _record(content: bytes, at: int, writer: Writer) -> Record | None:
    """Return the record at an offset; None unless it is complete and its unit exists."""
    *values, check = _CHECKED.unpack_from(content, at)
    if check != zlib.crc32(content[at : at + _RECORD.size]):
        return None
    try:
        values[4], values[5], values[6] = _PHASES[values[4]], Mark(values[5]), bool(values[6])
    except (ValueError, IndexError):
        return None
    record = Record(*values)
    return record if 0 <= record.unit < len(writer.units) else None


@dataclass(frozen=True)
class Logs:
    """The logs of a folder's newest run, by model and rank, and remarks on files that were left out."""

    ranks: tuple[RankLog, ...]
    remarks: tuple[str, ...] = ()


def read_log(path: Path) -> RankLog:
    """Read one log; like `parse_log`, it raises ValueError for another file."""
    log = parse_log(_content(path))
    alive = log.writer.process.is_alive
    if alive is False:  # again, since only now it is the last
        log = parse_log(_content(path))
    return replace(log, alive=alive, read_ns=time.time_ns())


def _content(path: Path) -> bytes:
    """Read a regular file; a pipe or a device could block for ever."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return path.read_bytes()


def read_folder(folder: Path, run: str | None = None) -> Logs:
    """Read the logs of one run in a folder; by default the newest run.

    Raises:
        ConfigurationError: There is no such folder, or no log of the run that can be read in it.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder, or not yet: ranks make it when their model is sharded, and `mfsdp train` "
            "removes it at a good end; give the one that MFSDP_HANG_LOG, log_for_hangs or --out (OUT/hang) named"
        )
    found: list[RankLog] = []
    remarks: list[str] = []
    for path in sorted(folder.iterdir()):
        if rank_and_model(path.name) is not None:
            try:
                found.append(read_log(path))
            except (ValueError, OSError) as error:
                remarks.append(f"{path.name} was left out: {error}")
    if not found:
        more = f" ({'; '.join(remarks)})" if remarks else ""
        raise ConfigurationError(
            f"{folder} holds no log of a rank{more}; train with MFSDP_HANG_LOG={folder}, or call "
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


# ---- writing ---------------------------------------------------------------------------------------------------------


class Ring:
    """The writer of a log, which replaces an older file; it counts and hashes operations."""

    def __init__(self, path: Path, writer: Writer, capacity: int = RECORDS) -> None:
        self.path = path
        self.written = 0  # records so far
        self.last_ns = time.time_ns()  # when the last one was written; when the file was made, before the first
        # how many times weights have been installed; the collective that was launched last
        self.step, self.collective = 0, NO_NUMBER
        self._count = self._hash = self._epoch = 0
        self._has_words = False
        self._pid = os.getpid()
        about = {"mfsdp_hang_log": _VERSION, "phases": _PHASE_NAMES, "records": capacity, "writer": asdict(writer)}
        head = json.dumps(about, ensure_ascii=False).encode() + b"\n"
        self._capacity, self._begin = capacity, len(head)
        # Renamed into place: a reader of an old file keeps its pages, and none ever sees half a header.
        beside = path.with_name(f"{path.name}.{self._pid}")
        beside.write_bytes(head + bytes(_size(capacity)))
        with beside.open("r+b") as file:
            self._memory: mmap.mmap | None = mmap.mmap(file.fileno(), 0)
        beside.replace(path)

    def note_terminations(self) -> None:
        """Append Python's stack to the file at SIGTERM, before the handler that was installed.

        It works while this process waits in a collective, where a handler in Python would have to wait too, and would
        keep the process from ending. Of several logs of a process the last that asked gets it. A handler that is
        installed later replaces this one.
        """
        if hasattr(faulthandler, "register"):  # not on Windows
            file = self.path.open("ab", buffering=0)  # `faulthandler` keeps it open
            faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)
            os.register_at_fork(after_in_child=partial(faulthandler.unregister, signal.SIGTERM))

    def add(self, mark: Mark, phase: Phase, unit: int = 0, num_bytes: int = 0) -> None:
        """Write an event."""
        in_backward = torch._C._current_graph_task_id() != -1
        now_ns = time.time_ns()
        after = self._epoch, self.collective, num_bytes, self._count, self._hash
        self._write(
            RECORD_BYTES + WORDS_BYTES + self.written % self._capacity * RECORD_BYTES,
            Record(self.written, now_ns, self.step, unit, phase, mark, in_backward, *after),
        )
        self.written += 1
        self.last_ns = now_ns

    def launch(self, phase: Phase, unit: int, num_bytes: int) -> None:
        """Write that a phase begins to communicate."""
        self._count += 1
        self._hash = fold(self._hash, phase, unit, num_bytes)
        self.add(Mark.LAUNCHES, phase, unit, num_bytes)

    def reset(self) -> None:
        """Write a reset, and restart count and hash: ranks may have stopped at different points."""
        self._count = self._hash = 0
        self._epoch = (self._epoch + 1) % 256
        self._has_words = False
        self.add(Mark.RESET, Phase.FORWARD)

    def beat(self, collective: int = NO_NUMBER, phase: Phase = Phase.FORWARD, unit: int = 0) -> None:
        """Write a heartbeat with the oldest collective that has not completed."""
        now_ns = time.time_ns()
        self._write(0, Record(0, now_ns, 0, unit, phase, Mark.BEAT, collective=collective))

    def write_error(self, error: BaseException) -> None:
        """Write the latest error: its frames, innermost last, then its type and message.

        Long text keeps its end, which names the error.
        """
        if self._memory is None:
            return
        self._has_words = True
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
        lines = [f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
        text = "\n".join([*lines, "".join(traceback.format_exception_only(error)).strip()])
        said = text.encode("utf-8", "backslashreplace")[-WORDS_BYTES:].ljust(WORDS_BYTES, b"\0")
        at = self._begin + RECORD_BYTES
        self._memory[at : at + WORDS_BYTES] = said

    def close(self) -> None:
        """Write the last record and the error that ends the process, if any; later events are dropped."""
        if self._memory is None or os.getpid() != self._pid:  # a forked child shares the pages and must not write
            return
        error = getattr(sys, "last_value", None)  # set by the interpreter for an uncaught error
        if isinstance(error, BaseException) and not self._has_words:
            self.write_error(error)
        self.add(Mark.GOODBYE, Phase.FORWARD)
        self._memory = None  # not closed: another thread may be writing a heartbeat

    def _write(self, place: int, record: Record) -> None:
        if self._memory is not None:
            at = self._begin + place
            packed = _RECORD.pack(*record[:4], _NUMBER_OF[record.phase], *record[5:])
            self._memory[at : at + RECORD_BYTES] = packed + zlib.crc32(packed).to_bytes(4, "little")
