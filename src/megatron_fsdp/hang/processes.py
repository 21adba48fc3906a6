"""Which process is this, and is that one alive?"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_START_FIELD = 19  # field 22 of proc(5), counted after the name in parentheses, which may hold anything


@dataclass(frozen=True)
class Process:
    """One process among all that ever were.

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


def this_process() -> Process:
    """The one that asks."""
    return Process(socket.gethostname(), os.getpid(), _started(os.getpid()), _namespace())


def is_alive(process: Process) -> bool | None:
    """Whether it still runs; None: it is of another machine or container, so nobody here knows."""
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
    """Dead, but its parent has not looked yet."""
    return _fields(pid)[:1] == ["Z"]
