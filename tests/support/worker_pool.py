"""Persistent worker processes for multi-rank tests: started once, told functions to run, replaced when they break.

A call hands the same module-level function and arguments to every rank and returns one result per rank:

    results = pool.run(fn, tensor)   # each rank runs fn(tensor) with torch.distributed initialised

A rank asks `torch.distributed` who it is. Functions, arguments and results travel as plain pickles, so tensors are
copied by value. Before each call every random generator of the worker is seeded with 0.
"""

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection as mp_connection
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked

from tests.support.worker_main import STACK_SIGNAL, Reply, WorkerSpec, worker_main

# Guards against waiting for ever, far above what anything takes: the machine may be busy with other things.
DEFAULT_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 600.0
_STACK_DUMP_TIMEOUT_S = 120.0
MAX_CALLS = 300  # long-lived gloo processes leak threads
_MAX_THREADS = 150  # gloo leaves some behind for each group, also when it is destroyed; they wake up every 10 ms
_SHOWN_CHARACTERS = 6000
_PRELOADED_MODULES = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch._dynamo",  # which the first optimizer of a process imports
    "megatron_fsdp.ddp",
    "megatron_fsdp.sharding.mesh",
    "megatron_fsdp.megatron_fsdp",
    "megatron_fsdp.fully_shard",
    "tests.support.worker_main",
]
_PRELOADED_WHERE_USED = {"accelerate", "hypothesis", "peft", "pytest", "transformers"}


def preloaded_modules() -> list[str]:
    """Return what the server of the forks imports once, so that no worker does: what costs half a second and more.

    Of the libraries that only some tests use it is the modules that this process has imported by now.
    """
    used = [name for name in sys.modules if name.partition(".")[0] in _PRELOADED_WHERE_USED]
    return [*_PRELOADED_MODULES, *used]


class WorkerError(Exception):
    """One or more ranks raised, died or hung; the message holds a traceback or stack for each rank concerned.

    Attributes:
        by_rank: rank -> traceback, stack or exit status, for the ranks that did not return.
    """

    def __init__(self, task: str, by_rank: dict[int, str]) -> None:
        self.by_rank = by_rank
        parts = [f"--- rank {rank}: {text}" for rank, text in sorted(by_rank.items())]
        super().__init__(f"{task} failed on rank(s) {sorted(by_rank)}:\n" + "\n".join(parts))


@dataclass(eq=False)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    spec: WorkerSpec
    reply: Reply | None = None

    def finished(self) -> bool:
        """Take the reply if one has arrived; finished is who replied or ended."""
        alive = self.process.is_alive()  # asked first: what was sent before the end is still received
        with contextlib.suppress(EOFError, OSError):
            if self.reply is None and self.connection.poll():
                self.reply = pickle.loads(self.connection.recv_bytes())
        return self.reply is not None or not alive


@dataclass
class WorkerPool:
    """`world_size` worker processes that form one process group on the loopback interface.

    Attributes:
        world_size: number of ranks.
        warning_filters: pytest `filterwarnings` entries to apply in the workers.
        device_type: "cpu" (gloo) or "cuda" (gloo for CPU tensors, NCCL for CUDA tensors; rank i uses device i).
        failure_grace_s: seconds the other ranks get to finish once one rank has failed.
    """

    world_size: int
    warning_filters: tuple[str, ...] = ("error",)
    device_type: str = "cpu"
    failure_grace_s: float = 20.0
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _store: TCPStore | None = field(default=None, init=False)
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)
    _call_count: int = field(default=0, init=False)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """Run `fn(*args)` on every rank and return the results in rank order.

        Args:
            fn: a module-level function of an importable module.
            *args: picklable arguments, the same for every rank.
            timeout_s: seconds until the ranks that still run are taken for hung.

        Raises:
            WorkerError: if a rank raised, died or hung; the workers are then replaced before the next call.
        """
        request = pickle.dumps((fn, args))
        self._ensure_started()
        self._call_count += 1
        for worker in self._workers:
            worker.reply = None
            with contextlib.suppress(OSError):  # a worker that just died is reported below
                worker.connection.send_bytes(request)
        replies = self._await_replies(fn.__qualname__, timeout_s)
        if self._worn_out(replies):
            self.stop()
        return [pickle.loads(reply.value) for reply in replies if reply.value is not None]

    def stop(self) -> None:
        """End every worker process now; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
            worker.process.close()
        self._workers = []
        self._store = None
        self._call_count = 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def process_ids(self) -> list[int]:
        """Return the process id of each live worker, in rank order."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _ensure_started(self) -> None:
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.stop()
        context = get_context("forkserver")
        context.set_forkserver_preload(preloaded_modules())
        self._folder = tempfile.TemporaryDirectory(prefix="worker-pool-")
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_START_TIMEOUT_S)
        )
        for rank in range(self.world_size):
            spec = self._spec(rank, Path(self._folder.name), self._store.port)
            parent_end, child_end = context.Pipe()
            process = context.Process(target=worker_main, args=(spec, child_end), daemon=True, name=f"rank{rank}")
            process.start()
            child_end.close()
            self._workers.append(_Worker(process, parent_end, spec))
        self._await_replies("start of the workers", _START_TIMEOUT_S)

    def _spec(self, rank: int, folder: Path, store_port: int) -> WorkerSpec:
        return WorkerSpec(
            rank=rank,
            world_size=self.world_size,
            device_type=self.device_type,
            store_port=store_port,
            log_path=folder / f"rank{rank}.log",
            stack_path=folder / f"rank{rank}.stack",
            warning_filters=self.warning_filters,
        )

    def _await_replies(self, task: str, timeout_s: float) -> list[Reply]:
        """Return every rank's reply; whatever goes wrong ends the workers, which may be in the middle of anything."""
        try:
            self._wait_until_finished(timeout_s)
            if errors := self._errors(timeout_s):
                raise WorkerError(task, errors)
        except BaseException:
            self.stop()
            raise
        return [worker.reply for worker in self._workers if worker.reply is not None]

    def _wait_until_finished(self, timeout_s: float) -> None:
        """Wait until all ranks finished, the time is up, or the grace after a first failure is."""
        deadline = time.monotonic() + timeout_s
        failed = False
        while pending := [worker for worker in self._workers if not worker.finished()]:
            finished = (worker for worker in self._workers if worker not in pending)
            if not failed and any(worker.reply is None or worker.reply.error for worker in finished):
                failed = True
                deadline = min(deadline, time.monotonic() + self.failure_grace_s)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            ends = [end for worker in pending for end in (worker.connection, worker.process.sentinel)]
            mp_connection.wait(ends, remaining_s)

    def _errors(self, timeout_s: float) -> dict[int, str]:
        hung = [worker for worker in self._workers if not worker.finished()]
        stacks = _dump_stacks(hung)
        errors: dict[int, str] = {}
        for rank, worker in enumerate(self._workers):
            if rank in stacks:
                errors[rank] = f"still running (limit {timeout_s:g} s, or {self.failure_grace_s:g} s after another "
                errors[rank] += f"rank failed), stack:\n{_shorten(stacks[rank])}"
            elif worker.reply is None:
                errors[rank] = f"died, exit code {worker.process.exitcode}\n{_tail(worker.spec.log_path)}"
            elif worker.reply.error is not None:
                errors[rank] = _shorten(worker.reply.error)
        return errors

    def _worn_out(self, replies: Sequence[Reply]) -> bool:
        threads = max(reply.threads for reply in replies)
        return self._call_count >= MAX_CALLS or threads > _MAX_THREADS


def _dump_stacks(workers: Sequence[_Worker]) -> dict[int, str]:
    """Ask each worker for its Python stacks and return them by rank."""
    for worker in workers:
        assert worker.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_DUMP_TIMEOUT_S
    while time.monotonic() < deadline and not all(_has_whole_dump(worker.spec.stack_path) for worker in workers):
        time.sleep(0.05)
    return {worker.spec.rank: _test_stack(_read(worker.spec.stack_path)) for worker in workers}


def _has_whole_dump(path: Path) -> bool:
    # The main thread is the oldest, thus the last one written, and its outermost frame is a module: a file read
    # while the process still writes ends elsewhere.
    return _read(path).endswith(" in <module>\n")


def _test_stack(dump: str) -> str:
    """Keep the threads that run test code, and of those the lines above the worker's own frames."""
    kept = []
    for thread in dump.split("\n\n"):
        lines = [line for line in thread.splitlines() if "multiprocessing" not in line]
        if any("_die_with_parent" in line for line in lines):
            continue
        kept.append("\n".join(line for line in lines if worker_main.__code__.co_filename not in line))
    return "\n".join(kept) or "(no stack: the process did not answer)"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tail(path: Path) -> str:
    return _read(path)[-_SHOWN_CHARACTERS:]


def _shorten(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
