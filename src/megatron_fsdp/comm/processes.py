"""Identities of processes (machine, number and start), and the launcher that restarts ranks."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

RUN_ID = "TORCHELASTIC_RUN_ID"
_START_FIELD = 19  # field 22 of proc(5), counted after the name in parentheses, which may hold anything


@dataclass(frozen=True)
class Process:
    """The identity of a process, unique over machines and time."""

    host: str
    pid: int
    # when it began, in clock ticks since the machine did; None if the system does not show it
    started: int | None = None
    namespace: str = ""  # where its number counts, where the system says (containers number their processes anew)

    @property
    def is_alive(self) -> bool | None:
        """True if it still runs and is no zombie; None if it belongs to another machine or container."""
        if (self.host, self.namespace) != (socket.gethostname(), _namespace()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _started(self.pid) == self.started and _stat(self.pid)[:1] != ["Z"]


def this_process() -> Process:
    """Return the current process."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """Return a process of this machine."""
    return Process(socket.gethostname(), pid, _started(pid), _namespace())


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None


def launcher() -> str:
    """Return the elastic agent that restarts this rank, as JSON; empty without one."""
    return json.dumps(asdict(process_of(os.getppid()))) if RUN_ID in os.environ else ""


def is_launcher_alive(said: str) -> bool:
    """Return True if an agent, as `launcher` names it, lives on this machine; others cannot be seen from here."""
    with suppress(ValueError, TypeError):
        return Process(**json.loads(said)).is_alive is True
    return False
