"""The file of a ring log: what one rank did last, in a form that survives its sudden end. Bytes only; no process.

    0       magic, version, sizes (`_HEAD`), and a checksum over the text that follows
    64      who wrote it: JSON, padded to a multiple of 64 bytes
    ...     a sign of life (`_BEAT`), padded to 64 bytes
    ...     the last words: 4 bytes of length, 4 of checksum, then UTF-8
    ...     the ring: records of 64 bytes; record number n lies at place n modulo their count
    ...     after the end: what `faulthandler` appends for each SIGTERM: the stack of Python at that moment

All numbers are little-endian. Each record ends with a checksum over its other bytes, so that one that was being written
while the process died, or while somebody reads, is known for what it is.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"MFSDPLOG"
VERSION = 1
SUFFIX = ".mfsdplog"
WORDS_BYTES = 4096
NO_NUMBER = -1
"""In place of a collective's number where there is none."""

_ALIGN = 64
_HEAD = struct.Struct("<8sIIIII")  # magic, version, length of the text, its checksum, records, bytes of a record
_BEAT = struct.Struct("<qqiB3xI")  # time, unfinished collective, its unit, its phase, checksum
_WORDS = struct.Struct("<II")
_RECORD = struct.Struct("<QqIiBBBBqQQQ")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
assert RECORD_BYTES == _ALIGN


class Mark(IntEnum):
    """What a record says of its phase and unit."""

    BEGINS = 0
    ENDS = 1
    LAUNCHES = 2  # the phase has started to communicate; counted, and folded into the hash
    FAILED = 3  # an exception passed through
    RESET = 4  # the pass was broken off, and the model was brought to rest
    GOODBYE = 5  # the process ends, or the log was switched off


@dataclass(frozen=True)
class Record:
    """One thing that happened on one rank.

    Attributes:
        number: Which one, from 0.
        time_ns: When, in nanoseconds since 1970 by this rank's clock.
        step: How many times weights had been installed.
        unit: The unit's index.
        phase: Index of the phase in the log's list of phases.
        mark: What of it.
        in_backward: Whether autograd ran.
        collective: Number of the collective that was launched last; `NO_NUMBER` before the first.
        num_bytes: What the phase communicates, in bytes; 0 for phases that send a few numbers.
        count: How many phases have communicated, this one included.
        hash: Over (phase, unit, bytes) of all of these.
        epoch: How often the model was reset, modulo 256; `count` and `hash` begin anew each time.
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
    """A sign of life, given about once a second by a thread of its own.

    Attributes:
        time_ns: When, in nanoseconds since 1970.
        unfinished: Number of the oldest collective that an accelerator has not completed; `NO_NUMBER`: none, or the
            host waits for collectives itself, so that records say it.
        unit: Whose it is.
        phase: Index of the phase that launched it.
    """

    time_ns: int
    unfinished: int = NO_NUMBER
    unit: int = 0
    phase: int = 0


@dataclass(frozen=True)
class Places:
    """Where the parts of a file lie, in bytes from its beginning.

    Attributes:
        beat: The sign of life.
        words: The last words.
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
        """Where record `number` lies."""
        return self.ring + number % self.capacity * RECORD_BYTES


def _padded(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _places(text_bytes: int, capacity: int) -> Places:
    beat = _ALIGN + _padded(text_bytes)
    words = beat + _ALIGN
    return Places(beat, words, words + WORDS_BYTES, capacity)


def new_file(who: Mapping[str, Any], capacity: int) -> tuple[bytes, Places]:
    """The bytes of a log without records, and where things go in it.

    Args:
        who: What to know about the writer; JSON.
        capacity: Records to hold, at least 1.
    """
    text = json.dumps(who, ensure_ascii=False).encode()
    places = _places(len(text), capacity)
    content = bytearray(places.end)
    _HEAD.pack_into(content, 0, MAGIC, VERSION, len(text), zlib.crc32(text), capacity, RECORD_BYTES)
    content[_ALIGN : _ALIGN + len(text)] = text
    return bytes(content), places


def read_head(content: bytes) -> tuple[dict[str, Any], Places]:
    """Who wrote a file, and where things are in it.

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
    """Put a record in its place.

    Args:
        memory: The file, writable.
        places: Where things are in it.
        record: The fields of `Record`, in order; a bare tuple, because this is done for every event.
    """
    packed = _RECORD.pack(*record[:7], record[11], *record[7:11])
    at = places.record(record[0])
    memory[at : at + RECORD_BYTES] = packed + _CHECK.pack(zlib.crc32(packed))


def read_records(content: bytes, places: Places) -> tuple[list[Record], int]:
    """All whole records, in order, and how many places hold something else.

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
    """Give a sign of life."""
    packed = _BEAT.pack(beat.time_ns, beat.unfinished, beat.unit, beat.phase, 0)
    packed = packed[:-4] + _CHECK.pack(zlib.crc32(packed[:-4]))
    memory[places.beat : places.beat + _BEAT.size] = packed


def read_beat(content: bytes, places: Places) -> Beat | None:
    """The last sign of life; None where there is none, or it was being written."""
    raw = content[places.beat : places.beat + _BEAT.size]
    if len(raw) < _BEAT.size:
        return None
    time_ns, unfinished, unit, phase, check = _BEAT.unpack(raw)
    return Beat(time_ns, unfinished, unit, phase) if time_ns and check == zlib.crc32(raw[:-4]) else None


def write_words(memory: Any, places: Places, text: str) -> None:
    """Leave the last words; the end of a text that is too long is what is kept, since it names the error."""
    said = text.encode("utf-8", "backslashreplace")[-(WORDS_BYTES - _WORDS.size) :]
    at = places.words + _WORDS.size
    memory[at : at + len(said)] = said
    memory[places.words : at] = _WORDS.pack(len(said), zlib.crc32(said))


def read_words(content: bytes, places: Places) -> str:
    """The last words; empty where there are none, or they were being written."""
    if len(content) < places.ring:
        return ""
    length, check = _WORDS.unpack_from(content, places.words)
    said = content[places.words + _WORDS.size :][: min(length, WORDS_BYTES)]
    return said.decode("utf-8", "replace") if said and zlib.crc32(said) == check else ""


def read_termination(content: bytes, places: Places) -> str:
    """What Python ran when SIGTERM came last, as `faulthandler` tells it; empty where none came."""
    return content[places.end :].decode("utf-8", "replace").strip()[-WORDS_BYTES:]
