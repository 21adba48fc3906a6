"""The processes of all ranks on this machine: started together, ended together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_fsdp.train.launch.failures import ERROR_FILE_VARIABLE, INTERRUPTED_FILE_VARIABLE

POLL_S = 0.05
GRACE_S = 5.0
"""Between being asked to end and being killed; where a peer is gone there is nothing left to save."""
STORE_FILE_VARIABLE = "MEGATRON_FSDP_STORE_FILE"
"""Names the file by which ranks of one machine find each other; no port is opened for that."""
LAUNCHER_VARIABLE = "MEGATRON_FSDP_LAUNCHER_PID"
"""The process that starts the ranks; it may be gone before a rank can ask the system for its parent."""
FOLDER_PREFIX = "mfsdp-run-"


@dataclass(frozen=True)
class Start:
    """What one start of all ranks is about.

    Attributes:
        command: What every rank runs.
        ranks: How many.
        run_id: Of the run, the same for all starts.
        restart: How often the ranks were started before.
        max_restarts: How often they may be.
        folder: For files between launcher and ranks; there already.
    """

    command: Sequence[str]
    ranks: int
    run_id: str
    restart: int
    max_restarts: int
    folder: Path

    def error_file(self, rank: int) -> Path:
        """Where a rank writes why it failed."""
        return self.folder / f"error-{self.restart}-{rank}.json"

    @property
    def interrupted_file(self) -> Path:
        """What is there once ranks have ended because one of them was asked to."""
        return self.folder / f"interrupted-{self.restart}"

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank is told, by the names that torchrun uses."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RESTART_COUNT": str(self.restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            ERROR_FILE_VARIABLE: str(self.error_file(rank)),
            INTERRUPTED_FILE_VARIABLE: str(self.interrupted_file),
            LAUNCHER_VARIABLE: str(os.getpid()),
            STORE_FILE_VARIABLE: str(self.folder / f"store-{self.restart}"),
        }


def launcher_of(environment: Mapping[str, str]) -> int:
    """The process that started this rank: ours by its own word, else the parent."""
    return int(environment.get(LAUNCHER_VARIABLE, os.getppid()))


def tidy_after_launcher(environment: Mapping[str, str]) -> None:
    """Remove the folder between launcher and ranks, where the launcher was killed and cannot do it itself."""
    folder = Path(environment.get(STORE_FILE_VARIABLE, "")).parent
    if os.getppid() != launcher_of(environment) and folder.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


class Crew:
    """The ranks of one start, each in a session of its own: what the terminal sends reaches the launcher only."""

    def __init__(self, start: Start, environment: Mapping[str, str]) -> None:
        """Start all ranks."""
        self._start = start
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(start.ranks):
            own = {**environment, **start.environment(rank)}
            self._processes.append(subprocess.Popen(start.command, env=own, start_new_session=True))

    def poll(self) -> Mapping[int, ProcessFailure] | None:
        """What has become of them.

        Returns:
            Ranks that failed by themselves (none: all are done); None while all that did not end well still run.
        """
        codes = [process.poll() for process in self._processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if not failed and None in codes:
            return None
        if failed:
            time.sleep(2 * POLL_S)  # the cause may write its reason while its peers have ended already
            codes = [process.poll() for process in self._processes]
            failed = {rank: code for rank, code in enumerate(codes) if code}
        return {rank: self._failure(rank, code) for rank, code in failed.items()}

    @property
    def is_interrupted(self) -> bool:
        """Whether ranks that ended well did so because one of them was asked to."""
        return self._start.interrupted_file.exists()

    def ask_to_end(self) -> None:
        """Tell every rank, and not the workers that it may have, that it should end."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def end(self, grace_s: float = GRACE_S) -> None:
        """End every rank and its workers, kindly first."""
        self.ask_to_end()
        until = time.monotonic() + grace_s
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(POLL_S)
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _failure(self, rank: int, code: int) -> ProcessFailure:
        return ProcessFailure(rank, self._processes[rank].pid, code, str(self._start.error_file(rank)))
