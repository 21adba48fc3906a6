"""What one worker process of the pool does: join the process group, then answer calls until its parent is gone."""

import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but its re-export is not marked

STACK_SIGNAL = signal.SIGUSR1
"""On this signal a worker writes its Python stacks to its stack file."""

_PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)  # longer than any call may take: hangs are the pool's to report


@dataclass(frozen=True)
class WorkerSpec:
    """Everything one worker needs to know when it starts."""

    rank: int
    world_size: int
    device_type: str
    store_port: int
    log_path: Path
    stack_path: Path
    warning_filters: tuple[str, ...]


@dataclass(frozen=True)
class Reply:
    """The outcome of one call on one rank: a pickled value, or the text of what was raised."""

    value: bytes | None
    error: str | None
    threads: int


def worker_main(spec: WorkerSpec, connection: Connection) -> None:
    """Serve calls on `connection` until it closes; never returns to multiprocessing's own shutdown."""
    _prepare_process(spec)
    _join_process_group(spec)
    gc.freeze()  # what is alive now stays; collecting after each call need not look at it
    environment = dict(os.environ)
    try:
        connection.send_bytes(pickle.dumps(Reply(None, None, 1)))  # ready
        while True:
            connection.send_bytes(pickle.dumps(_answer(connection.recv_bytes(), spec, environment)))
    except (EOFError, OSError):
        pass
    # Skip destructors: taking gloo down while a peer is already gone can abort the process.
    os._exit(0)


def _prepare_process(spec: WorkerSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno() if sys.stdout else 1)
    os.dup2(log, sys.stderr.fileno() if sys.stderr else 2)
    faulthandler.enable(file=log)
    stack_file = os.open(spec.stack_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    apply_warning_filters(spec.warning_filters)
    install_importhook(get_config())


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join_process_group(spec: WorkerSpec) -> None:
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
    dist.init_process_group(
        backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=_PROCESS_GROUP_TIMEOUT
    )
    dist.barrier()


def _count_threads() -> int:
    """Count the threads of this process, those of back ends included; 0 where the system does not tell."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _answer(request: bytes, spec: WorkerSpec, environment: dict[str, str]) -> Reply:
    """Run one pickled `(fn, args)` from a known state of all random generators, and catch whatever it raises."""
    value, error = None, None
    try:
        call: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(request)
        fn, args = call
        random.seed(0)
        torch.manual_seed(0)
        value = pickle.dumps(fn(*args))
    except BaseException as raised:  # noqa: BLE001 - SystemExit and pytest outcomes must reach the parent too
        error = _short_traceback(raised)
    _restore_process(spec, environment)
    return Reply(value, error, _count_threads())


def _restore_process(spec: WorkerSpec, environment: dict[str, str]) -> None:
    """Undo what a call may have left behind, so that the next one does not depend on it."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    apply_warning_filters(spec.warning_filters)
    gc.collect()
    gc.freeze()  # modules and caches of this call stay: collecting, and counting what lives, need not look at them


def _short_traceback(raised: BaseException) -> str:
    frames = traceback.TracebackException.from_exception(raised)
    if frames.stack and frames.stack[0].filename == __file__:
        del frames.stack[0]
    return "".join(frames.format()).strip()


def apply_warning_filters(filters: Sequence[str]) -> None:
    """Set exactly the filters of a pytest `filterwarnings` list, in its order (later entries win).

    Args:
        filters: entries `action[:message[:category[:module]]]`; message and module are regular expressions.
    """
    warnings.resetwarnings()
    for entry in filters:
        action, message, category, module = (part.strip() for part in (entry + ":::").split(":")[:4])
        warnings.filterwarnings(cast(Literal["error", "ignore"], action), message, _category(category), module)


def _category(name: str) -> type[Warning]:
    if not name:
        return Warning
    module_name, _, class_name = name.rpartition(".")
    category = getattr(import_module(module_name or "builtins"), class_name)
    if not (isinstance(category, type) and issubclass(category, Warning)):
        raise TypeError(f"filterwarnings names {name!r}, which is no Warning; name a class derived from Warning.")
    return category
