"""Heartbeats of a rank; a run that hangs is explained and ended, wherever its ranks are stuck."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megatron_fsdp.config.hang_log import FOLDER_VARIABLE
from megatron_fsdp.errors import MegatronFSDPError
from megatron_fsdp.hang.explain import explain
from megatron_fsdp.hang.log_file import rank_and_model
from megatron_fsdp.hang.reading import Logs, read_folder, read_writer, state_of
from megatron_fsdp.train.launch.failures import EXIT_HUNG, HungError, report_failure
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.job import Job

if TYPE_CHECKING:
    from megatron_fsdp.train.engines.trained import Trained

FOLDER = "hang"
REPORT_FILE = "report.txt"
_MOST_PAUSE_S = 1.0
_TURN_S = 0.2
_MOST_TURNS = 10
_SILENT_S = 2.5  # a thread of every rank gives a sign every second


@dataclass
class Pulse:
    """The last heartbeat of a rank's training loop.

    Attributes:
        step: The step under way, from 1; 0 before the first.
        last_s: When it last made progress, on the clock `time.monotonic`.
        is_resting: Whether it does something that may take long, and whose collectives have their own time limit.
    """

    step: int = 0
    last_s: float = field(default_factory=time.monotonic)
    is_resting: bool = False

    def beat(self, step: int | None = None) -> None:
        """Record that this rank makes progress, and in which step."""
        self.step = self.step if step is None else step
        self.last_s = time.monotonic()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend hang detection inside the block: loading, saving and evaluating may take long."""
        self.is_resting = True
        try:
            yield
        finally:
            self.beat()
            self.is_resting = False

    @property
    def quiet_s(self) -> float:
        """Seconds since the last heartbeat; 0 while it rests."""
        return 0.0 if self.is_resting else time.monotonic() - self.last_s


class HangWatch:
    """Watches one rank from a thread, which runs also while the rank waits in a collective.

    When neither the loop nor the model has got anywhere for a time, the logs of all ranks are explained, the report is
    written to `hang/report.txt` and shown, Python's stack of this rank is written beside it, and the process ends with
    `EXIT_HUNG`; the launcher ends the others, and restarts all if restarts are left.
    """

    def __init__(self, folder: Path, job: Job, rank: Rank, pulse: Pulse) -> None:
        """Prepare to watch; the context manager starts it.

        Args:
            folder: Of results.
            job: Says how long nothing may happen; before the second step also as long as a collective may take, since
                there is much to make ready.
            rank: This process.
            pulse: Its signs of life.
        """
        self._first_timeout_s = max(job.hang_timeout_s, 60.0 * job.options.parallel.distributed_timeout_minutes)
        self._place = folder / FOLDER
        self._logs = self._place
        self._timeout_s, self._rank, self._pulse = job.hang_timeout_s, rank, pulse
        self._over = threading.Event()
        self._keeps_log = False
        self._trained: Trained | None = None

    def keep_log(self, trained: Trained) -> None:
        """Let a model of this package keep its log for hangs; collective.

        Raises:
            ConfigurationError: On every rank, where one cannot write.
        """
        if trained.inside is None:
            return
        told = os.environ.get(FOLDER_VARIABLE)
        if told is None:
            trained.inside.log_for_hangs(self._place)
            self._trained = trained
        else:  # it keeps one already
            self._logs = Path(told)
        self._keeps_log = True

    def __enter__(self) -> Self:
        self._pulse.beat()
        threading.Thread(target=self._watch, name="megatron_fsdp hang watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        if raised is None and self._trained is not None and self._trained.inside is not None:
            self._trained.inside.stop_logging_for_hangs()
            self._remove_logs()

    def _remove_logs(self) -> None:
        """Remove the logs of a rank that ended well: nobody needs them, and its process may live on."""
        with suppress(OSError):
            for path in self._place.iterdir():
                with suppress(ValueError):
                    if rank_and_model(path.name) is not None and read_writer(path).process.pid == os.getpid():
                        path.unlink()
            self._place.rmdir()  # where it is empty

    @property
    def quiet_s(self) -> float:
        """Seconds since the loop or the model on this rank last made progress."""
        quiet_s = self._pulse.quiet_s
        if quiet_s < self._timeout_s or not self._keeps_log:
            return quiet_s
        with suppress(MegatronFSDPError, OSError):
            for log in read_folder(self._logs).ranks:
                if log.writer.rank == self._rank.index and log.writer.process.pid == os.getpid():
                    quiet_s = min(quiet_s, state_of(log).quiet_s)
        return quiet_s

    def _watch(self) -> None:
        pause_s = min(_MOST_PAUSE_S, self._timeout_s / 4)
        while not self._over.wait(pause_s):
            quiet_s = self.quiet_s
            if quiet_s >= (self._timeout_s if self._pulse.step > 1 else self._first_timeout_s):
                self._give_up(quiet_s)
                return

    def _give_up(self, quiet_s: float) -> None:
        """Explain the hang, once among the ranks, and end the process."""
        began_s = time.time() - quiet_s
        time.sleep(_TURN_S * min(self._rank.index, _MOST_TURNS))  # so that mostly one of them explains
        told = f"nothing has happened for {quiet_s:.1f} s on rank {self._rank.index}, in step {self._pulse.step}"
        report = self._place / REPORT_FILE
        with suppress(OSError):
            self._place.mkdir(parents=True, exist_ok=True)
            with (self._place / f"stack_rank{self._rank.index}.txt").open("w") as file:
                faulthandler.dump_traceback(file)
        with suppress(OSError):
            if not report.exists() or report.stat().st_mtime < began_s:
                told = f"{told}\n{self._explained()}"
                report.write_text(told + "\n", encoding="utf-8")
            else:
                told = report.read_text(encoding="utf-8").rstrip()
        if not self._over.is_set():
            report_failure(HungError(f"{told}\n(also in {report}, with the stacks of ranks beside it)"), 0)
            sys.stderr.flush()
            os._exit(EXIT_HUNG)

    def _explained(self) -> str:
        if not self._keeps_log:
            return "this engine keeps no log for hangs; the stacks tell where each rank stands"
        try:
            logs = read_folder(self._logs)
            return "\n".join([*silent_told(logs), str(explain(logs, self._timeout_s / 2))])
        except (MegatronFSDPError, OSError) as error:
            return f"the logs of ranks cannot be read: {error}"


def silent_told(logs: Logs) -> list[str]:
    """Describe the ranks whose processes give no heartbeat any more while others do."""
    beats_ns = {log.writer.rank: log.beat.time_ns for log in logs.ranks if log.beat is not None}
    newest_ns = max(beats_ns.values(), default=0)
    return [
        f"rank {rank} has given no sign of life for {(newest_ns - beat_ns) / 1e9:.1f} s: its process was stopped, or "
        "is stuck in code that does not let other threads run"
        for rank, beat_ns in beats_ns.items()
        if (newest_ns - beat_ns) / 1e9 >= _SILENT_S
    ]
