"""Start ranks on this machine for one call, watch them, and end them in any case."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.multiprocessing.spawn import ProcessException, start_processes

from megatron_fsdp.comm.groups import bound_device
from megatron_fsdp.doctor.training import require_count
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, RankError, words_of

_GRACE_S = 5.0
"""Seconds that other ranks may run once a rank has failed."""
_SHOWN = 4000
_NEVER_BEGAN = (
    "it never began: new processes import the script again, so what starts ranks has to stand in a file, under "
    '`if __name__ == "__main__":`'
)


@dataclass(frozen=True)
class _Job:
    """The arguments of all ranks; `call` is a pickle of a function and its arguments."""

    call: bytes
    num_ranks: int
    device_type: str
    folder: Path
    timeout_s: float

    def file(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank{rank}.{kind}"


def run_on_ranks(
    act: Callable[[Any, torch.device], Any], task: Any, num_ranks: int, device: str | None, timeout_s: float
) -> Any:
    """Run `act(task, device)` on the existing ranks or on new ones, and restore torch's random state."""
    here = partial(_act_here, act)
    return here(task, device) if dist.is_initialized() else run_on_local_ranks(here, task, num_ranks, device, timeout_s)


def _act_here(act: Callable[[Any, torch.device], Any], task: Any, device_name: str | None) -> Any:
    if device_name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device_name = "cpu" if found is None or dist.get_backend() == "gloo" else found.type
    if device_name == "cpu":
        with torch.random.fork_rng([]):
            return act(task, torch.device("cpu"))
    device = torch.device(device_name, torch.accelerator.current_device_index())
    with torch.random.fork_rng([device], device_type=device_name):
        return act(task, device)


def run_on_local_ranks(
    act: Callable[[Any, str | None], Any], task: Any, num_ranks: int, device: str | None, timeout_s: float
) -> Any:
    """Run `act(task, device)`, a function of a module, on new processes, and return rank 0's result.

    torch.distributed is initialised there. `device` is "cpu", an accelerator, or None: the accelerator if there is one
    for every rank. The whole call may take `timeout_s` seconds. Errors of this package that ranks raise are raised
    here; a rank that fails otherwise, dies or exceeds the time is a `RankError`.
    """
    require_count("ranks", num_ranks)
    device_type = choose_device(device, num_ranks)
    call = _pickled((act, task, device_type))
    with tempfile.TemporaryDirectory(prefix="mfsdp-ranks-") as folder:
        job = _Job(call, num_ranks, device_type, Path(folder), timeout_s)
        context = start_processes(_rank_main, (job,), num_ranks, join=False, daemon=True, start_method="spawn")
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(max(0.0, deadline - time.monotonic()), _GRACE_S):
                if time.monotonic() >= deadline:
                    raise _late(job, [rank for rank, process in enumerate(context.processes) if process.is_alive()])
        except ProcessException as error:
            raise _first_failure(job, error, [process.exitcode for process in context.processes]) from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return pickle.loads(job.file(0, "result").read_bytes())


def choose_device(device: str | None, num_ranks: int) -> str:
    """Choose the device type for `num_ranks` ranks."""
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
            f"the ranks are processes of their own, and something cannot be sent to them ({words_of(error)}); give "
            "functions of a module (not lambdas, nor functions inside functions) or import paths such as "
            '"package.module:name", or call this under torchrun after init_process_group()'
        ) from error


# ---- in the rank ---------------------------------------------------------------------------------------------------


def _rank_main(rank: int, job: _Job) -> None:
    """Join the process group, run, and write the result or the failure."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # comes when the parent dies, and has to end a wait in a collective
    log = os.open(job.file(rank, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        join_job(rank, job)
        act, task, device = pickle.loads(job.call)
        result = act(task, device)
        dist.barrier()
        if rank == 0:
            job.file(rank, "result").write_bytes(pickle.dumps(result))
    except BaseException as error:  # noqa: BLE001 - SystemExit too has to reach the parent
        text = _short("".join(traceback.format_exception(error)))
        reported = RankError(f"rank {rank} failed, and all ranks were ended:\n{text}")
        known = error if isinstance(error, MegatronFSDPError) else reported
        job.file(rank, "failure").write_bytes(pickle.dumps((time.time_ns(), known)))
        os._exit(1)  # without waiting for peers
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def join_job(rank: int, job: _Job) -> None:
    """Join the process group of a job, as one of its ranks."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)  # one process sums in one order
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.num_ranks), LOCAL_RANK=str(rank))
    backend, device = "gloo", torch.device(job.device_type, rank)
    if job.device_type != "cpu":
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{job.device_type}:{dist.get_default_backend_for_device(job.device_type)}"
    store = FileStore(str(job.folder / "store"), job.num_ranks)
    timeout = timedelta(seconds=job.timeout_s + _GRACE_S)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=job.num_ranks,
        timeout=timeout,
        device_id=bound_device(backend, device),
    )


# ---- in the parent -------------------------------------------------------------------------------------------------


def _first_failure(job: _Job, error: ProcessException, codes: Sequence[int | None]) -> Exception:
    """Return the failure that caused the others; a rank that died could not report one.

    Ranks that SIGTERM ended were still waiting, so they are no cause.
    """
    files = [job.file(rank, "failure") for rank in range(job.num_ranks)]
    failures = {rank: pickle.loads(file.read_bytes()) for rank, file in enumerate(files) if file.exists()}
    died = [rank for rank, code in enumerate(codes) if rank == error.error_index or code not in (0, -signal.SIGTERM)]
    silent = [rank for rank in died if rank not in failures]
    if silent:
        rank = error.error_index if error.error_index in silent else silent[0]
        code = codes[rank] or 0
        how = f"with exit code {code}" if code > 0 else f"(killed by signal {-code})"
        how = "(killed by signal 9, as when memory runs out)" if code == -9 else how
        return RankError(f"rank {rank} died {how}, and all ranks were ended:\n{_log(job, rank, _NEVER_BEGAN)}")
    first: Exception = min(failures.values(), key=lambda failure: failure[0])[1]
    return first


def _late(job: _Job, running: Sequence[int]) -> RankError:
    reported = _log(job, running[0], "(it had not begun: it was still importing)") if running else ""
    return RankError(
        f"rank(s) {', '.join(map(str, running))} took more than {job.timeout_s:g} s and were ended; they wait for each "
        f"other, or need more time (timeout_s):\n{reported}"
    )


def _log(job: _Job, rank: int, never: str) -> str:
    path = job.file(rank, "log")
    return (_short(path.read_text(errors="replace")) or "(it wrote nothing)") if path.exists() else never


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"
