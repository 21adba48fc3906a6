"""Joins the process group; agrees, reduces and works with the other ranks. Every function here is collective."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_fsdp.comm.agreement import Problem, ask, first_problem
from megatron_fsdp.comm.groups import bound_device
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.failures import MEETING_VARIABLE, OutOfMemoryError

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_MEETING = timedelta(minutes=30)
_BEAT_S = 5.0  # well below the time limit of a collective, which the work of `work_on_machines` may exceed by far


@dataclass(frozen=True)
class Rank:
    """This process among its peers, where it computes, and the process that started it."""

    index: int
    count: int
    device: torch.device
    launcher_pid: int

    @property
    def is_first(self) -> bool:
        """True for the rank that prints and writes files."""
        return self.index == 0

    def require_launcher(self) -> None:
        """Check that the launcher is alive."""
        if os.getppid() != self.launcher_pid:
            raise RuntimeError(f"the process {self.launcher_pid} that started rank {self.index} is gone")


@contextmanager
def join_ranks(
    device_type: str, timeout: timedelta | None = None, backend: Literal["auto", "nccl", "gloo"] = "auto"
) -> Iterator[Rank]:
    """Join the process group of all ranks; destroy it if the block ends well.

    Ranks that this package started meet through a file, others by torchrun's variables. If all of them are on one
    machine, back ends use its loopback interface only, unless the user has named another.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local)
    if device.type != "cpu":
        torch.accelerator.set_device_index(local)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        for name, interface in loopback_interface().items():
            os.environ.setdefault(name, interface)
    chosen = dist.get_default_backend_for_device(device) if backend == "auto" else backend
    launcher = os.getppid()
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting: dict[str, Any] = {}  # nothing: as the environment says
    if MEETING_VARIABLE in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        # One store for all restarts, with the addresses of ranks that are gone.
        store, *_ = next(rendezvous(os.environ.get(MEETING_VARIABLE, "env://"), index, count, timeout=_MEETING))
        fresh = dist.PrefixStore(f"start {os.environ.get(_RESTARTS, '0')}", store)  # type: ignore[attr-defined]
        meeting = {"store": fresh, "rank": index, "world_size": count}
    dist.init_process_group(chosen, timeout=timeout, device_id=bound_device(chosen, device), **meeting)
    yield Rank(dist.get_rank(), dist.get_world_size(), device, launcher)
    dist.barrier()  # no rank leaves while a peer still needs the connection
    dist.destroy_process_group()


def restarts_so_far(rank: Rank) -> int:
    """All-reduce the largest number of restarts; an agent that returns counts anew."""
    (restarts,) = reduce_values(rank, [float(os.environ.get(_RESTARTS, "0"))], "max")
    return int(restarts)


def loopback_interface() -> dict[str, str]:
    """Return the variables that keep backend traffic on the loopback; empty if there is no known loopback."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {} if loopback is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback)


def reduce_values(rank: Rank, values: Sequence[float], how: Literal["sum", "max"]) -> list[float]:
    """All-reduce each value by sum or maximum, in float64 where the device has it."""
    op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how]
    tensor = torch.tensor(values, dtype=torch.float64, device=rank.device)
    dist.all_reduce(tensor, op)
    return [float(value) for value in tensor.tolist()]


def work_on_machines(rank: Rank, work: Callable[[], None]) -> None:
    """Run `work` on the first rank of each machine; collective, and over when all have finished.

    The ranks meet every few seconds, so that no collective runs into its time limit however long the work takes.
    """
    pool = ThreadPoolExecutor(1, "preparation")
    task = pool.submit(work) if int(os.environ.get("LOCAL_RANK", rank.index)) == 0 else None
    pool.shutdown(wait=False)
    while True:
        if task is not None:
            wait([task], _BEAT_S)
        rank.require_launcher()
        is_pending = task is not None and not task.done()
        if reduce_values(rank, [float(is_pending)], "max") == [0.0]:
            break
    error = None if task is None else cast(Exception | None, task.exception())
    problem: Problem | None = None
    if isinstance(error, ConfigurationError | OutOfMemoryError):
        problem = type(error), str(error)
    elif error is not None:
        problem = RuntimeError, f"rank {rank.index}: {error!r}"
    ask([(dist.group.WORLD, problem)], first_problem, error)
