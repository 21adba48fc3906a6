"""A log that gives signs of life, and speaks up when nothing happens for too long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from pathlib import Path

from megatron_fsdp.engine.collective_log import NO_NUMBER, RingLog
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.errors import MegatronFSDPError
from megatron_fsdp.hang.explain import explain
from megatron_fsdp.hang.flight_recorder import dump_flight
from megatron_fsdp.hang.opening import open_ring
from megatron_fsdp.hang.reading import read_folder
from megatron_fsdp.hang.state import state_of

_BEAT_S = 1.0
_NOTE_AFTER_S = 1.0
"""An error that ends a wait is explained with what has stood still for so long; the other ranks may be ending too."""


class HangLog(RingLog):
    """The log of a model on this rank, with a thread that beats and watches.

    Ranks that wait all see the same logs, so the lowest of those that wait in the folder explains, once for each
    standstill, and the others keep quiet. Where each machine has a folder of its own, one rank of each machine does.
    Nothing is stopped: what looks like a hang may be a slow step.

    Args:
        folder: Where the logs are.
        engine: Of the model.
        timeout_s: How long nothing may happen inside of a phase; None: only beat.
    """

    def __init__(self, folder: Path, engine: Engine, timeout_s: float | None) -> None:
        ring, self.writer = open_ring(folder, engine)
        super().__init__(ring, engine.units, keeps_handles=engine.device.type != "cpu")
        ring.note_terminations()
        self.folder = folder
        self.timeout_s = timeout_s
        self._explained_at = -1
        over = threading.Event()
        threading.Thread(
            target=_watch, args=(weakref.ref(self), over), name="megatron_fsdp hang log", daemon=True
        ).start()
        weakref.finalize(self, over.set)

    def look(self) -> float:
        """Beat, and speak up if it is time to.

        Returns:
            Seconds until the next look.
        """
        beat = self.beat()
        if self.timeout_s is None:
            return _BEAT_S
        quiet_s = (time.time_ns() - self.ring.last_ns) / 1e9
        waits = self.is_open or beat.unfinished != NO_NUMBER
        if waits and quiet_s >= self.timeout_s and self._explained_at != self.ring.written:
            self._explained_at = self.ring.written
            self._speak_up(quiet_s)
        return min(_BEAT_S, self.timeout_s / 4)

    def withdraw(self) -> None:
        """Leave no log: another rank could not begin its own, and numbers of models are the same on all ranks."""
        self.close()
        self.ring.path.unlink(missing_ok=True)

    def explains(self) -> str:
        """As `Observer`."""
        with contextlib.suppress(MegatronFSDPError, OSError):
            found = explain(read_folder(self.folder, self.writer.run), _NOTE_AFTER_S)
            return str(found) if found.is_odd else ""
        return ""

    def _speak_up(self, quiet_s: float) -> None:
        dump_flight(self.folder, self.writer)
        try:
            logs = read_folder(self.folder, self.writer.run)
        except (MegatronFSDPError, OSError) as error:
            text = f"the logs cannot be read: {error}"
        else:
            waiting = [
                log.writer.rank for log in logs.ranks if log.writer.model == self.writer.model and state_of(log).waits
            ]
            if waiting and min(waiting) < self.writer.rank:
                return
            text = str(explain(logs, self.timeout_s or 0.0))
        sys.stderr.write(f"[rank {self.writer.rank}] nothing has happened for {quiet_s:.1f} s\n{text}\n")
        sys.stderr.flush()


def _watch(reference: weakref.ref[HangLog], over: threading.Event) -> None:
    """Look again and again, for as long as the log is there."""
    pause_s = 0.0
    while not over.wait(pause_s):
        log = reference()
        if log is None:
            return
        pause_s = log.look()
        del log
