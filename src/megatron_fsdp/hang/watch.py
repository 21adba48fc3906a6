"""A log with heartbeats, which explains a hang when nothing happens for too long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_fsdp.engine.collective_log import NO_NUMBER, PHASES, Ring, RingLog
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError
from megatron_fsdp.hang.explain import explain
from megatron_fsdp.hang.reading import dump_flight, flight_name, read_folder, read_writer
from megatron_fsdp.hang.state import state_of
from megatron_fsdp.hang.writer import Process, UnitFacts, Writer, file_name, is_alive, rank_and_model, this_process

_RUN_KEY = "megatron_fsdp_hang_log_run"
_BEAT_S = 1.0
_NOTE_AFTER_S = 1.0
"""Seconds without progress that explain an error that ended a wait; the other ranks may be ending too."""


class HangLog(RingLog):
    """The log of a model on this rank, with a thread that writes heartbeats and watches for a hang.

    Waiting ranks all see the same logs, so the lowest waiting rank of the folder explains, once for each standstill,
    and the others are silent. Where each machine has a folder of its own, one rank of each machine does.
    Nothing is stopped: what looks like a hang may be a slow step.

    Args:
        folder: Where the logs are.
        engine: Of the model.
        timeout_s: How long nothing may happen inside of a phase; None: write heartbeats only.
    """

    def __init__(self, folder: Path, engine: Engine, timeout_s: float | None) -> None:
        ring, self.writer = _open_ring(folder, engine)
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
        """Write a heartbeat, and explain if nothing has happened for too long.

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
        """Remove the log: another rank could not begin its own, and numbers of models are the same on all ranks."""
        self.close()
        self.ring.path.unlink(missing_ok=True)

    def explains(self) -> str:
        """Return an explanation of what is odd, or an empty string (see `Observer`)."""
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
    """Look again and again until the log is collected or closed."""
    pause_s = 0.0
    while not over.wait(pause_s):
        log = reference()
        if log is None:
            return
        pause_s = log.look()
        del log


# ---- beginning a log -------------------------------------------------------------------------------------------------


def _open_ring(folder: Path, engine: Engine) -> tuple[Ring, Writer]:
    """Create a log in a folder, which is made where it is missing.

    A log that another process left there under the same name is replaced if that process is over. Models of one process
    are numbered in the order in which their logs begin, which must be the same on all ranks.

    Raises:
        ConfigurationError: The folder cannot be written, or a job that still runs keeps its logs there.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
    group = engine.reaching_all[0]
    process = this_process()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = _run() if is_distributed else uuid.uuid4().hex
        model = _first_free(folder, rank, run, process)
        writer = Writer(
            rank,
            world,
            tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,),
            model,
            run,
            time.time_ns(),
            process,
            _facts(engine.units),
            tuple(phase.value for phase in PHASES),
        )
        (folder / flight_name(rank, model)).unlink(missing_ok=True)  # of an earlier run
        return Ring(folder / file_name(rank, model), asdict(writer)), writer
    except OSError as error:
        raise ConfigurationError(
            f"the log for hangs cannot be written to {folder} ({type(error).__name__}: {error}); name a folder that "
            "can be made and written"
        ) from error


def _first_free(folder: Path, rank: int, run: str, process: Process) -> int:
    """Return the number after the last model whose log this process has begun in the folder.

    Raises:
        ConfigurationError: A process of another run that still lives writes a log of this rank.
    """
    found = (rank_and_model(path.name) for path in folder.iterdir())
    models = sorted((place[1] for place in found if place is not None and place[0] == rank), reverse=True)
    for model in models:  # logs of this process come before those of earlier ones
        try:
            writer = read_writer(folder / file_name(rank, model))
        except (OSError, ValueError):
            continue
        if writer.process == process:
            return model + 1
        if writer.run != run and is_alive(writer.process):
            raise ConfigurationError(
                f"{folder} holds the log of rank {rank} of another job, which still runs (process "
                f"{writer.process.pid} on {writer.process.host}); give each job its own folder for logs of hangs"
            )
    return 0


def _run() -> str:
    """Return the name of the run: that of the first rank that asked, through the store that all ranks share."""
    store = distributed_c10d._get_default_store()
    return bytes(store.compare_set(_RUN_KEY, "", uuid.uuid4().hex)).decode()


def _facts(units: Sequence[Unit]) -> tuple[UnitFacts, ...]:
    return tuple(
        UnitFacts(
            unit.label,
            tuple(name for group in unit.groups for name in group.names),
            sum(group.plan.layout.payload_numel * group.plan.precision.compute.itemsize for group in unit.groups),
        )
        for unit in units
    )
