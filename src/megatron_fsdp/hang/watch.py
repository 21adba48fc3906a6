"""The observer that keeps a log with heartbeats, and explains a hang after a time limit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from megatron_fsdp.comm.agreement import all_agree
from megatron_fsdp.comm.collectives import Moment
from megatron_fsdp.comm.processes import Process, this_process
from megatron_fsdp.config.engine_options import checked_timeout
from megatron_fsdp.engine.engine import Engine, engine_of_model
from megatron_fsdp.engine.observer import ON_REQUEST, Observer, Phase, close_phase
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError
from megatron_fsdp.hang.explain import explain, state_of
from megatron_fsdp.hang.log_file import Mark, Ring, UnitFacts, Writer, file_name, rank_and_model, read_folder, read_log

_RUN_KEY = "megatron_fsdp_hang_log_run"
_MOST_HANDLES = 1024
_BEAT_S = 1.0
_NOTE_AFTER_S = 1.0
"""Seconds without progress that explain an error that ended a wait; the other ranks may be ending too."""


@dataclass
class _Open:
    """A phase that has begun."""

    phase: Phase
    unit: int
    is_counted: bool = False  # as one that communicates


class HangLog(Observer):
    """The log of a model on this rank, with a thread that writes heartbeats and watches for a hang.

    Waiting ranks all see the same logs, so the lowest waiting rank of the folder explains, once for each standstill,
    and the others are silent. Where each machine has a folder of its own, one rank of each machine does. Nothing is
    stopped: what looks like a hang may be a slow step. The log is closed when this is deleted or the process ends.
    Without `timeout_s` it writes heartbeats only.
    """

    def __init__(self, folder: Path, engine: Engine, timeout_s: float | None) -> None:
        self.folder = folder
        self.ring, self.writer = _open_ring(folder, engine)
        self.ring.note_terminations()
        self.close = weakref.finalize(self, self.ring.close)
        self._timeout_s = timeout_s
        self._units = engine.units
        # On accelerators the host goes on before a collective is complete; its handle then says whether it is.
        self._keeps_handles = engine.device.type != "cpu"
        self._handles: deque[tuple[dist.Work, int, Phase, int]] = deque(maxlen=_MOST_HANDLES)
        self._open: list[_Open] = []
        self._error = 0  # id of the last error written: it passes through many phases
        self._explained_at = -1
        over = threading.Event()
        threading.Thread(
            target=_watch, args=(weakref.ref(self), over), name="megatron_fsdp hang log", daemon=True
        ).start()
        weakref.finalize(self, over.set)

    # ---- notifications of the model ------------------------------------------------------------------------------

    def begins(self, phase: Phase, unit: int) -> None:
        """Write the beginning of a phase."""
        self.ring.step += phase is Phase.INSTALL
        self._open.append(_Open(phase, unit))
        self.ring.add(Mark.BEGINS, phase, unit)
        if phase in ON_REQUEST:  # these communicate beside the streams
            self._launch()

    def ends(self, phase: Phase, unit: int) -> None:
        """Write the end of a phase."""
        close_phase(self._open, phase, unit)
        self.ring.add(Mark.ENDS, phase, unit)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:
        """Write the failure of a phase. An error that passes through several phases belongs to the innermost."""
        close_phase(self._open, phase, unit)
        if id(error) == self._error:
            self.ring.add(Mark.ENDS, phase, unit)
            return
        self._error = id(error)
        self.ring.write_error(error)
        self.ring.add(Mark.FAILED, phase, unit)

    def forgets(self) -> None:
        """Write a reset."""
        self._open.clear()
        self._handles.clear()
        self._error = 0
        self.ring.reset()

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None) -> None:  # noqa: ARG002
        """Count a launch, and keep the work handle of a collective that the host does not wait for."""
        if moment is Moment.LAUNCHES:
            self.ring.collective = number
            self._launch()
        elif moment is Moment.LAUNCHED and work is not None and self._keeps_handles and self._open:
            self._handles.append((work, number, self._open[-1].phase, self._open[-1].unit))

    def explains(self) -> str:
        """Return the diagnosis, or an empty string if no rank stands out (see `Observer`)."""
        with contextlib.suppress(MegatronFSDPError, OSError):
            found = explain(read_folder(self.folder, self.writer.run), _NOTE_AFTER_S)
            return str(found) if found.is_odd else ""
        return ""

    def _launch(self) -> None:
        """Record that the innermost phase communicates; it counts once for all its collectives."""
        if self._open and not self._open[-1].is_counted:
            inner = self._open[-1]
            inner.is_counted = True
            self.ring.launch(inner.phase, inner.unit, _communicated_bytes(inner.phase, self._units[inner.unit]))

    # ---- the thread ----------------------------------------------------------------------------------------------

    def look(self) -> float:
        """Write a heartbeat, explain a hang after the time limit, and return the seconds until the next heartbeat."""
        while self._handles and self._handles[0][0].is_completed():
            self._handles.popleft()
        unfinished = list(self._handles)[:1]
        self.ring.beat(*(unfinished[0][1:] if unfinished else ()))
        if self._timeout_s is None:
            return _BEAT_S
        quiet_s = (time.time_ns() - self.ring.last_ns) / 1e9
        if (self._open or unfinished) and quiet_s >= self._timeout_s and self._explained_at != self.ring.written:
            self._explained_at = self.ring.written
            self._speak_up(quiet_s)
        return min(_BEAT_S, self._timeout_s / 4)

    def _speak_up(self, quiet_s: float) -> None:
        try:
            logs = read_folder(self.folder, self.writer.run)
        except (MegatronFSDPError, OSError) as error:
            text = f"the logs cannot be read: {error}"
        else:
            same_model = [log for log in logs.ranks if log.writer.model == self.writer.model]
            waiting = [log.writer.rank for log in same_model if state_of(log).waits]
            # One explanation per standstill: the lowest waiting rank gives it.
            if waiting and min(waiting) < self.writer.rank:
                return
            text = str(explain(logs, self._timeout_s or 0.0))
        sys.stderr.write(f"[rank {self.writer.rank}] nothing has happened for {quiet_s:.1f} s\n{text}\n")
        sys.stderr.flush()


def _watch(reference: weakref.ref[HangLog], over: threading.Event) -> None:
    """Run the heartbeats until the log is collected or closed."""
    pause_s = 0.0
    while not over.wait(pause_s):
        log = reference()
        if log is None:
            return
        pause_s = log.look()
        del log  # or this thread would keep the log alive while it waits


# ---- the log of a model ----------------------------------------------------------------------------------------------


def log_for_hangs(model: nn.Module, folder: str | os.PathLike[str], *, timeout_s: float | None = None) -> None:
    """Log this rank's latest events of a model, a wrapper or one that is sharded in place; see its method. Collective.

    Raises:
        ConfigurationError: As `MegatronFSDP.log_for_hangs`, or the model is not sharded.
    """
    start_logging(engine_of_model(model), folder, timeout_s)


def start_logging(engine: Engine, folder: str | os.PathLike[str], timeout_s: float | None) -> None:
    """Begin the log of an engine. Collective."""
    log = None
    try:
        with all_agree("starting a log for hangs", engine.reaching_all):
            if kept := _log_of(engine):
                raise ConfigurationError(
                    f"this model keeps a log for hangs in {kept.folder} already; call stop_logging_for_hangs() first"
                )
            timeout_s = None if timeout_s is None else checked_timeout(timeout_s)
            log = HangLog(Path(folder), engine, timeout_s)
    except BaseException:
        if log is not None:  # another rank has none: models must have the same numbers on all ranks
            log.close()
            log.ring.path.unlink(missing_ok=True)
        raise
    assert log is not None
    engine.observers.add(log)


def stop_logging_for_hangs(model: nn.Module) -> None:
    """Close the log of a model, if there is one."""
    engine = engine_of_model(model)
    if log := _log_of(engine):
        engine.observers.remove(log)
        log.close()


def _log_of(engine: Engine) -> HangLog | None:
    return next((each for each in engine.observers.watching if isinstance(each, HangLog)), None)


# ---- beginning a log -------------------------------------------------------------------------------------------------


def _open_ring(folder: Path, engine: Engine) -> tuple[Ring, Writer]:
    """Create a log in a folder, and the folder if needed.

    A log of the same name is replaced if its process is over. Models of one process are numbered in the order in which
    their logs begin, which must be the same on all ranks.
    """
    is_distributed = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if is_distributed else 0
    group = engine.reaching_all[0]
    process = this_process()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = _run() if is_distributed else uuid.uuid4().hex
        writer = Writer(
            rank,
            tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,),
            _first_free(folder, rank, run, process),
            run,
            time.time_ns(),
            process,
            _facts(engine.units),
        )
        return Ring(folder / file_name(rank, writer.model), writer), writer
    except OSError as error:
        raise ConfigurationError(
            f"the log for hangs cannot be written to {folder} ({type(error).__name__}: {error}); name a folder that "
            "can be made and written"
        ) from error


def _first_free(folder: Path, rank: int, run: str, process: Process) -> int:
    """Return the next model number of this process in the folder."""
    found = (rank_and_model(path.name) for path in folder.iterdir())
    models = sorted((place[1] for place in found if place is not None and place[0] == rank), reverse=True)
    for model in models:  # logs of this process come before those of earlier ones
        try:
            writer = read_log(folder / file_name(rank, model)).writer
        except (OSError, ValueError):
            continue
        if writer.process == process:
            return model + 1
        if writer.run != run and writer.process.is_alive:
            raise ConfigurationError(
                f"{folder} holds the log of rank {rank} of another job, which still runs (process "
                f"{writer.process.pid} on {writer.process.host}); give each job its own folder for logs of hangs"
            )
    return 0


def _run() -> str:
    """Return the run's name, which the first rank chooses through the shared store."""
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


def _communicated_bytes(phase: Phase, unit: Unit) -> int:
    """Return the bytes that a phase communicates: of the full weights or the whole bucket, not of one rank's shard.

    0 for phases that send only a few numbers.
    """
    if phase is Phase.UNSHARD:
        return unit.all_gather_bytes
    if phase is Phase.REDUCE:
        return unit.bucket_bytes
    if phase is Phase.GATHER_OUTER:
        return sum(group.plan.sent_bytes for group in unit.groups if group.plan.gathers_outer)
    if phase is Phase.REDUCE_OUTER:
        return sum(group.plan.outer_buffer_bytes for group in unit.groups)
    return 0
