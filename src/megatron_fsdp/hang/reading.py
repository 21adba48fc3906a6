"""Logs of a folder, and dumps of PyTorch's flight recorder beside them, as frozen data.

What cannot be read is left out, with a remark. Of the flight recorder, which records the last collectives of a
process, of any library, only the JSON form is read; dumps in pickle, which could run code, are left alone.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from megatron_fsdp.engine.collective_log import (
    Beat,
    Record,
    read_beat,
    read_head,
    read_records,
    read_termination,
    read_words,
)
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.writer import Writer, is_alive, is_log_name, writer_from_json

MOST_FILE_BYTES = 1 << 28
_MOST_FLIGHT_BYTES = 1 << 26
_FLIGHTS_SHOWN = 3


@dataclass(frozen=True)
class RankLog:
    """The last records of one rank.

    Attributes:
        writer: Who it is.
        records: The last ones, oldest first.
        torn: Places of the ring that hold no whole record.
        beat: The last heartbeat; None: there was none.
        words: The last error that was logged; empty: none.
        alive: Whether the process runs; None: it is on another machine.
        flight: What PyTorch's flight recorder had, one line per collective; empty where there is no dump.
        read_ns: When it was read, in nanoseconds since 1970.
        termination: What Python ran when SIGTERM came last; empty: none came.
    """

    writer: Writer
    records: tuple[Record, ...]
    torn: int = 0
    beat: Beat | None = None
    words: str = ""
    alive: bool | None = None
    flight: tuple[str, ...] = ()
    read_ns: int = 0
    termination: str = ""


@dataclass(frozen=True)
class Logs:
    """The logs of the newest run in a folder.

    Attributes:
        ranks: By model, then by rank.
        remarks: What was left out and why, one sentence each.
    """

    ranks: tuple[RankLog, ...]
    remarks: tuple[str, ...] = ()


def read_writer(path: Path) -> Writer:
    """Read who wrote a log.

    Raises:
        ValueError: The file is none, or damaged; says how.
        OSError: It cannot be read.
    """
    return writer_from_json(read_head(_content(path))[0])


def read_log(path: Path) -> RankLog:
    """Read one log.

    Raises:
        ValueError: The file is none, or damaged; says how.
        OSError: It cannot be read.
    """
    alive = is_alive(read_writer(path).process)
    content = _content(path)  # again: of a process that is dead, this is the last
    who, places = read_head(content)
    writer = writer_from_json(who)
    records, torn = read_records(content, places)
    known = [r for r in records if r.unit in range(len(writer.units)) and r.phase < len(writer.phases)]
    return RankLog(
        writer,
        tuple(known),
        torn + len(records) - len(known),
        read_beat(content, places),
        read_words(content, places),
        alive,
        read_flight(path.with_name(flight_name(writer.rank, writer.model))),
        time.time_ns(),
        read_termination(content, places),
    )


def _content(path: Path) -> bytes:
    """Read all of a regular file; a pipe or a device could block, or never end."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    if path.stat().st_size > MOST_FILE_BYTES:
        raise ValueError(f"it has more than {MOST_FILE_BYTES} bytes")
    return path.read_bytes()


def read_folder(folder: Path, run: str | None = None) -> Logs:
    """Read the logs of one run in a folder.

    Args:
        folder: Where they are.
        run: Name of the run; None: the newest.

    Raises:
        ConfigurationError: There is no such folder, or no log of the run that can be read in it.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder; give the one that MFSDP_HANG_LOG or log_for_hangs named")
    found: list[RankLog] = []
    remarks: list[str] = []
    for path in sorted(folder.iterdir()):
        if not is_log_name(path.name):
            continue
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
    return _of_run(folder, found, run or max(found, key=lambda log: log.writer.started_ns).writer.run, remarks)


def _of_run(folder: Path, found: Sequence[RankLog], run: str, remarks: Sequence[str]) -> Logs:
    ranks = sorted((log for log in found if log.writer.run == run), key=lambda log: (log.writer.model, log.writer.rank))
    if not ranks:
        raise ConfigurationError(f"{folder} holds logs of other runs only; give each job its own folder")
    # SIGTERM is noted in the newest log of a process only.
    terminations = {log.writer.process: log.termination for log in ranks if log.termination}
    ranks = [replace(log, termination=terminations.get(log.writer.process, "")) for log in ranks]
    began_ns = min(log.writer.started_ns for log in ranks)
    others: dict[str, set[int]] = {}
    for log in found:
        if log.writer.run != run:
            which = "another run that still lives" if log.alive else "an earlier run"
            which = "a later run" if log.writer.started_ns > began_ns and not log.alive else which
            others.setdefault(which, set()).add(log.writer.rank)
    told = [
        f"logs of rank {', '.join(map(str, sorted(those)))} are of {which} and were left out"
        for which, those in others.items()
    ]
    return Logs(tuple(ranks), (*remarks, *told))


# ---- the flight recorder ---------------------------------------------------------------------------------------------


def flight_name(rank: int, model: int) -> str:
    """Return the file name of a dump."""
    return f"rank-{rank:05d}{f'.model-{model}' if model else ''}.flight.json"


def dump_flight(folder: Path, writer: Writer) -> bool:
    """Write this process's flight recorder beside its log; return whether it held anything.

    The recorder is on if `TORCH_FR_BUFFER_SIZE` (or `TORCH_NCCL_TRACE_BUFFER_SIZE`) is above 0.
    """
    dump: Callable[[], bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None) or getattr(
        _distributed_c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return False
    with contextlib.suppress(OSError, RuntimeError):
        text = dump()
        if not last_entries(text):
            return False
        beside = folder / f"{flight_name(writer.rank, writer.model)}.{writer.process.pid}"
        beside.write_bytes(text)
        beside.replace(folder / flight_name(writer.rank, writer.model))
        return True
    return False


def read_flight(path: Path) -> tuple[str, ...]:
    """Read the last collectives of a dump, one line each; nothing where there is none, or it cannot be read."""
    try:
        return last_entries(path.read_bytes()) if path.is_file() and path.stat().st_size <= _MOST_FLIGHT_BYTES else ()
    except OSError:
        return ()


def last_entries(text: bytes) -> tuple[str, ...]:
    """List the last collectives of a dump in JSON, oldest first, one line each.

    Args:
        text: As `torch._C._distributed_c10d._dump_fr_trace_json` gives it; anything else gives nothing.
    """
    try:
        found = json.loads(text)
        entries = found.get("entries", [])
        return tuple(_flight_told(entry) for entry in entries[-_FLIGHTS_SHOWN:])
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        return ()


def _flight_told(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group", entry.get("pg_name", "?"))
    if isinstance(group, list | tuple):
        group = " ".join(str(part) for part in group)
    return (
        f"{entry['profiling_name']} number {entry.get('collective_seq_id', '?')} of group {group}: "
        f"{entry.get('state', 'state unknown')}, {entry.get('input_sizes')} to {entry.get('output_sizes')}"
    )
