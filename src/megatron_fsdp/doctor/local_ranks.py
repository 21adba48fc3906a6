"""Starts ranks on this machine for one call, watches them, and ends them in any case."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but its re-export is not marked

from megatron_fsdp.doctor.task import require_count
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, RankError

_GRACE_S = 5.0
"""Seconds that other ranks may run once a rank has failed."""
_SHOWN = 4000
_NEVER_BEGAN = (
    "it never began: new processes import the script again, so what starts ranks has to stand in a file, under "
    '`if __name__ == "__main__":`'
)


@dataclass(frozen=True)
class _Place:
    """The rank of a process, and the file that it writes its result to."""

    rank: int
    num_ranks: int
    device_type: str
    folder: str
    timeout_s: float

    def file(self, kind: str) -> Path:
        return Path(self.folder) / f"rank{self.rank}.{kind}"


def run_on_local_ranks(
    act: Callable[[Any, str | None], Any], task: Any, num_ranks: int, device: str | None, timeout_s: float
) -> Any:
    """Run `act(task, device)`, a function of a module, on new processes with torch.distributed initialised.

    `device` is "cpu", an accelerator, or None: the accelerator where there is one for every rank. All of it may take
    `timeout_s` seconds.

    Returns:
        What rank 0 returned.

    Raises:
        ConfigurationError: The task cannot be sent to processes, or there are too few accelerators.
        RankError: A rank failed, died or took too long.
        MegatronFSDPError: What ranks raised themselves.
    """
    require_count("ranks", num_ranks)
    device_type = choose_device(device, num_ranks)
    job = _pickled((act, task, device_type))
    with tempfile.TemporaryDirectory(prefix="mfsdp-ranks-") as folder:
        places = [_Place(rank, num_ranks, device_type, folder, timeout_s) for rank in range(num_ranks)]
        context = get_context("spawn")
        processes = [context.Process(target=_rank_main, args=(place, job), daemon=True) for place in places]
        try:
            for process in processes:
                process.start()
            _wait(processes, timeout_s)
            _raise_first(places, processes, timeout_s)
        finally:
            for process in processes:
                _end(process)
        return pickle.loads(places[0].file("result").read_bytes())


def choose_device(device: str | None, num_ranks: int) -> str:
    """Choose the type of device for `num_ranks` ranks.

    Raises:
        ConfigurationError: There are not enough.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found is not None else 0
    if device is None:
        return found.type if found is not None and count >= num_ranks else "cpu"
    if device == "cpu":
        return device
    if found is None or found.type != device or count < num_ranks:
        here = "none is" if found is None else f"{count} of type {found.type} are"
        raise ConfigurationError(
            f"device is {device!r} for {num_ranks} ranks, one accelerator each, and {here} here; give fewer ranks or "
            'device="cpu"'
        )
    return device


def _pickled(job: Any) -> bytes:
    try:
        return pickle.dumps(job)
    except Exception as error:
        raise ConfigurationError(
            f"the ranks are processes of their own, and something cannot be sent to them ({error}); give functions of "
            'a module (not lambdas, nor functions inside functions) or import paths such as "package.module:name", or '
            "call this under torchrun after init_process_group()"
        ) from error


# ---- in the rank ---------------------------------------------------------------------------------------------------


def _rank_main(place: _Place, job: bytes) -> None:
    """Join the process group, run, write the result or the failure, and exit without waiting for peers."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(place.file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    status = 0
    try:
        _join(place)
        act, task, device = pickle.loads(job)
        result = act(task, device)
        dist.barrier()
        if place.rank == 0:
            place.file("result").write_bytes(pickle.dumps(result))
    except BaseException as error:  # noqa: BLE001 - SystemExit too has to reach the parent
        text = "".join(traceback.format_exception(error))
        known = (
            error
            if isinstance(error, MegatronFSDPError)
            else RankError(f"rank {place.rank} failed, and all ranks were ended:\n{_short(text)}")
        )
        place.file("failure").write_bytes(pickle.dumps((time.time_ns(), known)))
        status = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _join(place: _Place) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)  # one process sums in one order
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.num_ranks), LOCAL_RANK=str(place.rank))
    backend = "gloo"
    if place.device_type != "cpu":
        torch.accelerator.set_device_index(place.rank)
        backend = f"cpu:gloo,{place.device_type}:{dist.get_default_backend_for_device(place.device_type)}"
    store = FileStore(str(Path(place.folder) / "store"), place.num_ranks)
    timeout = timedelta(seconds=place.timeout_s + _GRACE_S)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.num_ranks, timeout=timeout)


# ---- in the parent -------------------------------------------------------------------------------------------------


def _wait(processes: Sequence[SpawnProcess], timeout_s: float) -> None:
    """Wait until all processes have ended, the time is up, or the grace after a first failure is over."""
    deadline, has_failed = time.monotonic() + timeout_s, False
    while running := [process for process in processes if process.is_alive()]:
        if not has_failed and any(process.exitcode for process in processes if process not in running):
            has_failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        left = deadline - time.monotonic()
        if left <= 0:
            return
        connection.wait([process.sentinel for process in running], left)


def _raise_first(places: Sequence[_Place], processes: Sequence[SpawnProcess], timeout_s: float) -> None:
    """Raise the first failure, which caused the others. A rank that died could not report anything."""
    failures = {
        place.rank: pickle.loads(place.file("failure").read_bytes())
        for place in places
        if place.file("failure").exists()
    }
    for place, process in zip(places, processes, strict=True):
        code = process.exitcode
        if code and place.rank not in failures:
            how = f"with exit code {code}" if code > 0 else f"(killed by signal {-code})"
            how = "(killed by signal 9, as when memory runs out)" if code == -9 else how
            raise RankError(
                f"rank {place.rank} died {how}, and all ranks were ended:\n{_log(place, never=_NEVER_BEGAN)}"
            )
    if failures:
        raise min(failures.values(), key=lambda failure: failure[0])[1]
    running = [place for place, process in zip(places, processes, strict=True) if process.is_alive()]
    if running:
        named = ", ".join(str(place.rank) for place in running)
        raise RankError(
            f"rank(s) {named} took more than {timeout_s:g} s and were ended; they wait for each other, or need more "
            f"time (timeout_s):\n{_log(running[0], never='(it had not begun: it was still importing)')}"
        )


def _log(place: _Place, never: str) -> str:
    path = place.file("log")
    if not path.exists():
        return never
    return _short(path.read_text(errors="replace")) or "(it wrote nothing)"


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"


def _end(process: SpawnProcess) -> None:
    if process.pid is None:
        return
    if process.is_alive():
        process.kill()
    process.join()
    process.close()
