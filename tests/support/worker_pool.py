"""Persistent worker processes for multi-rank tests: started once, told functions to run, replaced when they break.

A call hands the same module-level function and arguments to every rank and returns one result per rank:

    results = pool.run(fn, tensor)   # each rank runs fn(tensor) with torch.distributed initialised

A rank asks `torch.distributed` who it is. Functions, arguments and results travel as plain pickles, so tensors are
copied by value. Before each call every random generator of the worker is seeded with 0.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import apply_warning_filters, get_config
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

# Guards against waiting for ever, far above what anything takes: the machine may be busy with other things.
_MESSAGE_BYTES = "MFSDP_MESSAGE_BYTES"
DEFAULT_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 600.0
_STACK_DUMP_TIMEOUT_S = 120.0
_PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)  # longer than any call may take: hangs are the pool's to report
_MAX_THREADS = 150  # of one call that makes many groups: gloo has some for each, which wake up every 10 ms
_SHOWN_AT_EACH_END = 3000
ON_DROPPED_GROUPS: list[Callable[[], object]] = []
"""Called on a rank when the groups of a call are destroyed: clears what has kept their meshes."""
# The first optimizer of a process imports `torch._dynamo`.
_PRELOADED_MODULES = ["torch._dynamo", "megatron_fsdp.ddp", "megatron_fsdp.fully_shard", "tests.support.worker_pool"]


def preloaded_modules() -> list[str]:
    """Return what the server of the forks imports once, so that no worker does: what costs half a second and more."""
    libraries = {"accelerate", "hypothesis", "peft", "pytest", "transformers"}  # where this process has imported them
    return [*_PRELOADED_MODULES, *(name for name in sys.modules if name.partition(".")[0] in libraries)]


class WorkerError(Exception):
    """One or more ranks raised, died or waited for ever; `by_rank` has a traceback, stack or exit status of each."""

    def __init__(self, task: str, by_rank: dict[int, str]) -> None:
        self.by_rank = by_rank
        parts = [f"--- rank {rank}: {text}" for rank, text in sorted(by_rank.items())]
        super().__init__(f"{task} failed on rank(s) {sorted(by_rank)}:\n" + "\n".join(parts))


@dataclass(frozen=True)
class _Spec:
    rank: int
    world_size: int
    device_type: str
    store_port: int
    log_path: Path
    warning_filters: tuple[str, ...]


@dataclass(frozen=True)
class _Reply:
    value: bytes | None  # pickled
    error: str | None  # the text of what was raised
    threads: int


@dataclass(eq=False)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    spec: _Spec
    reply: _Reply | None = None

    def finished(self) -> bool:
        """Take the reply if one has arrived; finished is who replied or ended."""
        alive = self.process.is_alive()  # asked first: what was sent before the end is still received
        with contextlib.suppress(EOFError, OSError):
            if self.reply is None and self.connection.poll():
                self.reply = pickle.loads(self.connection.recv_bytes())
        return self.reply is not None or not alive

    def failure(self) -> str | None:
        """What this rank raised, how it died, or where it hangs, which ends it; None: it returned."""
        if self.reply is not None:
            return self.reply.error
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGABRT)  # its stacks go to its log
            self.process.join(_STACK_DUMP_TIMEOUT_S)
            told = "still running when the time was up, or some time after another rank failed; its log, with stacks:"
        else:
            told = f"died, exit code {self.process.exitcode}; its log:"
        return f"{told}\n{self.spec.log_path.read_text(errors='replace')}"


@dataclass
class WorkerPool:
    """`world_size` worker processes that form one process group on the loopback interface."""

    world_size: int
    warning_filters: tuple[str, ...] = ("error",)  # pytest's `filterwarnings` entries to apply in the workers
    device_type: str = "cpu"  # gloo; "cuda": gloo for CPU tensors, NCCL for CUDA tensors; rank i uses device i
    failure_grace_s: float = 20.0  # what the other ranks get to finish once one rank has failed
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _store: TCPStore | None = field(default=None, init=False)
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """Run `fn(*args)`, of an importable module, on every rank and return the results in rank order.

        Ranks that still run after `timeout_s` are taken to wait for ever. If a rank does, raises or dies
        (`WorkerError`), the workers are replaced before the next call.
        """
        given = {name: value for name, value in os.environ.items() if name == _MESSAGE_BYTES}  # a test's, not a pool's
        request = pickle.dumps((fn, args, given))
        if not self._workers or not all(worker.process.is_alive() for worker in self._workers):
            self._start()
        for worker in self._workers:
            worker.reply = None
            with contextlib.suppress(OSError):  # a worker that just died is reported below
                worker.connection.send_bytes(request)
        replies = self._await_replies(fn.__qualname__, timeout_s)
        if max(reply.threads for reply in replies) > _MAX_THREADS:
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
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _start(self) -> None:
        self.stop()
        context = get_context("forkserver")
        context.set_forkserver_preload(preloaded_modules())
        self._folder = tempfile.TemporaryDirectory(prefix="worker-pool-")
        timeout = timedelta(seconds=_START_TIMEOUT_S)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        for rank in range(self.world_size):
            log = Path(self._folder.name) / f"rank{rank}.log"
            spec = _Spec(rank, self.world_size, self.device_type, self._store.port, log, self.warning_filters)
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(spec, child_end), daemon=True, name=f"rank{rank}")
            process.start()
            child_end.close()
            self._workers.append(_Worker(process, parent_end, spec))
        self._await_replies("start of the workers", _START_TIMEOUT_S)

    def _await_replies(self, task: str, timeout_s: float) -> list[_Reply]:
        """Return every rank's reply; whatever goes wrong ends the workers, which may be in the middle of anything."""
        try:
            self._wait_until_finished(timeout_s)
            failures = {worker.spec.rank: worker.failure() for worker in self._workers}
            if errors := {rank: _shorten(text) for rank, text in failures.items() if text is not None}:
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
            wait(ends, remaining_s)


def _shorten(text: str) -> str:
    left_out = len(text) - 2 * _SHOWN_AT_EACH_END
    middle = f"\n... {left_out} characters left out ...\n"
    return text if left_out <= 0 else text[:_SHOWN_AT_EACH_END] + middle + text[-_SHOWN_AT_EACH_END:]


def _serve(spec: _Spec, connection: Connection) -> None:
    """Join the process group, then answer calls on `connection` until it closes."""
    _prepare_process(spec)
    _join_process_group(spec)
    gc.freeze()  # what is alive now stays; collecting after each call need not look at it
    environment = dict(os.environ)
    try:
        connection.send_bytes(pickle.dumps(_Reply(None, None, 1)))  # ready
        while True:
            connection.send_bytes(pickle.dumps(_answer(connection.recv_bytes(), spec, environment)))
    except (EOFError, OSError):
        pass
    # Skip destructors: taking gloo down while a peer is already gone can abort the process.
    os._exit(0)


def _prepare_process(spec: _Spec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno() if sys.stdout else 1)
    os.dup2(log, sys.stderr.fileno() if sys.stderr else 2)
    faulthandler.enable(file=log)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the pool aborts those that hang
    torch.set_num_threads(1)
    _apply_warning_filters(spec)
    install_importhook(get_config())


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join_process_group(spec: _Spec) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ.update(RANK=str(spec.rank), WORLD_SIZE=str(spec.world_size), LOCAL_RANK=str(spec.rank))
    # Ranks meet through it, and one may start much later than another: how long they may take is the pool's to say.
    store = TCPStore("127.0.0.1", spec.store_port, is_master=False, timeout=_PROCESS_GROUP_TIMEOUT)
    backend = "gloo"
    if spec.device_type == "cuda":
        torch.cuda.set_device(spec.rank)
        backend = "cpu:gloo,cuda:nccl"
    size, timeout = spec.world_size, _PROCESS_GROUP_TIMEOUT
    dist.init_process_group(backend, store=store, rank=spec.rank, world_size=size, timeout=timeout)
    dist.barrier()


def _answer(request: bytes, spec: _Spec, environment: dict[str, str]) -> _Reply:
    """Run one pickled `(fn, args)` from a known state of all random generators, and catch whatever it raises."""
    value, error = None, None
    try:
        _drop_process_groups()
        fn, args, given = pickle.loads(request)
        os.environ.pop(_MESSAGE_BYTES, None)
        os.environ.update(given)
        random.seed(0)
        torch.manual_seed(0)
        value = pickle.dumps(fn(*args))
    except BaseException:  # noqa: BLE001 - SystemExit and pytest outcomes must reach the parent too
        error = traceback.format_exc()
    _restore_process(spec, environment)
    tasks = Path("/proc/self/task")  # threads of back ends included; none where the system does not tell
    return _Reply(value, error, len(list(tasks.iterdir())) if tasks.is_dir() else 0)


def _drop_process_groups() -> None:
    """Destroy the groups of the call before: each has threads of gloo's, which wake up every 10 ms.

    All ranks have ended that call, so that none connects any more. DTensor remembers what an operation gives, mesh
    included, and takes a later mesh of the same ranks and names for the same.
    """
    for forget in ON_DROPPED_GROUPS:
        forget()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()
    gc.collect()
    gc.freeze()  # modules and caches of that call stay: collecting, and counting what lives, need not look at them


def _restore_process(spec: _Spec, environment: dict[str, str]) -> None:
    """Undo what a call may have left behind, so that the next one does not depend on it."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    _apply_warning_filters(spec)


def _apply_warning_filters(spec: _Spec) -> None:
    warnings.resetwarnings()
    apply_warning_filters(spec.warning_filters, ())
