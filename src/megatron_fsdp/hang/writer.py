"""The header of a log: rank, process and units, and the file's name."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp.engine.collective_log import SUFFIX

_NAME = re.compile(r"rank-(\d{5,})(?:\.model-(\d+))?" + re.escape(SUFFIX))
_START_FIELD = 19  # field 22 of proc(5), counted after the name in parentheses, which may hold anything


@dataclass(frozen=True)
class Process:
    """One process, told from all others, on any machine and at any time.

    Attributes:
        host: Name of its machine.
        pid: Its number there.
        started: When it began, in clock ticks since the machine did; None where the system does not say.
        namespace: Where its number counts, where the system says (containers number their processes anew).
    """

    host: str
    pid: int
    started: int | None = None
    namespace: str = ""


@dataclass(frozen=True)
class UnitFacts:
    """A unit, for messages.

    Attributes:
        label: Its name.
        parameters: Canonical names of its parameters.
        num_bytes: Of all its parameters on one rank that holds them whole, as they are computed with.
    """

    label: str
    parameters: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Writer:
    """Who wrote a log.

    Attributes:
        rank: Global rank.
        world_size: Ranks of the job.
        peers: Global ranks that share the model's parameters, itself included.
        model: Which model of the process, from 0.
        run: Name of the run, the same on all its ranks and never used again.
        started_ns: When the log was begun, in nanoseconds since 1970.
        process: Which process it is.
        units: All units, root first.
        phases: Names of the phases by their number.
    """

    rank: int
    world_size: int
    peers: tuple[int, ...]
    model: int
    run: str
    started_ns: int
    process: Process
    units: tuple[UnitFacts, ...]
    phases: tuple[str, ...]


def writer_from_json(found: Mapping[str, Any]) -> Writer:
    """Parse the writer from a header, the fields of a `Writer` as JSON.

    Raises:
        ValueError: Something is missing, or is not what it should be.
    """
    try:
        units = (UnitFacts(**{**unit, "parameters": tuple(unit["parameters"])}) for unit in found["units"])
        lists = {name: tuple(found[name]) for name in ("peers", "phases")}
        return Writer(**{**found, **lists, "process": Process(**found["process"]), "units": tuple(units)})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is incomplete ({error})") from None


def file_name(rank: int, model: int) -> str:
    """Return the file name of a model's log on a rank; the first model of a process needs no number."""
    return f"rank-{rank:05d}{f'.model-{model}' if model else ''}{SUFFIX}"


def rank_and_model(name: str) -> tuple[int, int] | None:
    """Parse rank and model from a log's file name; None where it is not a log's name."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def is_log_name(name: str) -> bool:
    """Return whether a file name is a log's."""
    return rank_and_model(name) is not None


# ---- processes -------------------------------------------------------------------------------------------------------


def this_process() -> Process:
    """Return the current process."""
    return Process(socket.gethostname(), os.getpid(), _started(os.getpid()), _namespace())


def is_alive(process: Process) -> bool | None:
    """Return whether a process still runs; None if it belongs to another machine or container."""
    if process.host != socket.gethostname() or process.namespace != _namespace():
        return None
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started = _started(process.pid)
    return started == process.started and not _is_zombie(process.pid)


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> int | None:
    fields = _fields(pid)
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None


def _is_zombie(pid: int) -> bool:
    """Return whether a process is dead but not yet reaped by its parent."""
    return _fields(pid)[:1] == ["Z"]
