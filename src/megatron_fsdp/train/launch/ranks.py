"""What a rank knows of the others: set-up, agreement, small sums. Every function here is called by all ranks."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.crew import STORE_FILE_VARIABLE, launcher_of, tidy_after_launcher
from megatron_fsdp.train.launch.failures import EXIT_FAILED
from megatron_fsdp.train.launch.meeting import store_of_this_start
from megatron_fsdp.train.launch.network import loopback_interface

T = TypeVar("T")

_WATCH_S = 0.5
_STORE_TIMEOUT = timedelta(minutes=30)
_AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun where its agent keeps the store of the ranks


@dataclass(frozen=True)
class Rank:
    """This process among its peers.

    Attributes:
        index: Global rank.
        count: Number of ranks.
        device: Where this rank computes.
        launcher_pid: Process that started the ranks.
    """

    index: int
    count: int
    device: torch.device
    launcher_pid: int

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return self.index == 0

    def require_launcher(self) -> None:
        """Check that the launcher lives.

        Raises:
            RuntimeError: It was killed so hard that it could not end its ranks; they must not go on unseen.
        """
        if os.getppid() != self.launcher_pid:
            raise RuntimeError(f"the process {self.launcher_pid} that started rank {self.index} is gone")


@contextmanager
def join_ranks(
    device_type: str, timeout: timedelta | None = None, backend: Literal["auto", "nccl", "gloo"] = "auto"
) -> Iterator[Rank]:
    """Join the process group of all ranks; leave it in good order when all went well.

    Ranks that our launcher started meet by way of a file, others as torchrun says. Where all of them are on
    one machine, back ends use its loopback interface only, unless the user has named another.

    Args:
        device_type: Such as `cpu` or `cuda`.
        timeout: How long a collective may take; None: as long as the back end allows.
        backend: Of the process group; auto is the one that PyTorch has for the device.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local)
    if device.type != "cpu":
        torch.accelerator.set_device_index(local)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        for name, interface in loopback_interface().items():
            os.environ.setdefault(name, interface)
    chosen = dist.get_default_backend_for_device(device) if backend == "auto" else backend
    launcher = launcher_of(os.environ)
    with _ending_with(launcher):
        _meet(chosen, timeout)
    yield Rank(dist.get_rank(), dist.get_world_size(), device, launcher)
    dist.barrier()  # nobody leaves while a peer still needs the connection
    dist.destroy_process_group()


def _meet(backend: str, timeout: timedelta | None) -> None:
    """Join the process group."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file = os.environ.get(STORE_FILE_VARIABLE)
    store: dist.Store  # type: ignore[name-defined]  # public, and not in torch's list of names
    if file is not None:
        store = dist.FileStore(file, count)  # type: ignore[attr-defined]  # likewise
    elif os.environ.get(_AGENT_STORE_VARIABLE) == str(True):
        longest = _STORE_TIMEOUT if timeout is None else timeout
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        shared = dist.TCPStore(*address, is_master=False, timeout=longest)  # type: ignore[attr-defined]  # likewise
        store = store_of_this_start(shared, index, count, longest.total_seconds())
    else:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=timeout)


@contextmanager
def _ending_with(launcher: int) -> Iterator[None]:
    """While the block runs, end this process when its launcher is gone: nobody would end a wait for missing peers."""
    is_over = threading.Event()

    def end_where_it_is_gone() -> None:
        if os.getppid() != launcher:
            tidy_after_launcher(os.environ)
            os._exit(EXIT_FAILED)

    def watch() -> None:
        while not is_over.wait(_WATCH_S):
            end_where_it_is_gone()

    # A peer may have removed the folder of the store; torch then waits for it without letting other threads run.
    end_where_it_is_gone()
    threading.Thread(target=watch, name="launcher watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def agree(rank: Rank, work: Callable[[], T]) -> T:
    """Do something on the first rank only and give its result to all.

    Raises:
        ConfigurationError: The work raised it; every rank raises the same.
    """
    answer: list[object] = [None, None]
    if rank.is_first:
        try:
            answer[0] = work()
        except ConfigurationError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0, device=rank.device)
    if answer[1] is not None:
        raise ConfigurationError(str(answer[1]))
    return answer[0]  # type: ignore[return-value]  # what the first rank's work returned


def reduce_values(rank: Rank, values: Sequence[float], how: Literal["sum", "max"]) -> list[float]:
    """Return the sum or the maximum over ranks of each value, in float64 where the device has it."""
    op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how]
    tensor = torch.tensor(values, dtype=torch.float64, device=rank.device)
    dist.all_reduce(tensor, op)
    return [float(value) for value in tensor.tolist()]


def gather_values(rank: Rank, value: int) -> list[int]:
    """Return every rank's value, in the order of the ranks."""
    values: list[int] = [0] * rank.count
    dist.all_gather_object(values, value)
    return values
