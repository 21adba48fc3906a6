"""Start the ranks of a run on this machine, and end them all when one fails or the user has had enough."""

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.failures import EXIT_FAILED, EXIT_USAGE, find_cause

CPU_RANKS = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
LOOPBACK = "127.0.0.1"
MODULE = "megatron_fsdp.train"


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun (or this launcher) started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def find_device_type(name: str) -> str:
    """Return the type of device for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigurationError: That accelerator is not here.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if found is None else found.type
    if name == "auto":
        return available
    if name not in ("cpu", available):
        raise ConfigurationError(f"--device {name} is not available here: use --device {available}, or leave it out")
    return name


def choose_ranks(requested: int | None, *, num_accelerators: int, num_cores: int) -> int:
    """Return how many ranks to start.

    Args:
        requested: What the user asked for, if anything.
        num_accelerators: Accelerators to use; 0 runs on the CPU.
        num_cores: CPU cores this process may use.

    Raises:
        ConfigurationError: More ranks were asked for than there are accelerators.
    """
    if num_accelerators == 0:
        return requested if requested is not None else min(CPU_RANKS, max(1, num_cores))
    if requested is not None and requested > num_accelerators:
        raise ConfigurationError(
            f"--ranks {requested} needs as many accelerators and {num_accelerators} are here: "
            f"give at most {num_accelerators}, or --device cpu"
        )
    return requested if requested is not None else num_accelerators


def count_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(environment: Mapping[str, str], ranks: int, num_cores: int) -> dict[str, str]:
    """Return the variables to add for the ranks: a fair share of the cores, and traffic that stays on this machine.

    What the user has set already is left alone.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores // ranks))}
    if loopback is not None:
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    return {name: value for name, value in wanted.items() if name not in environment}


def launch(argv: Sequence[str], ranks: int) -> int:
    """Run this module once per rank and return the exit code of the whole.

    Ranks get SIGINT and SIGTERM passed on; they die of them at once (see `__main__`).
    """
    os.environ.update(rank_environment(os.environ, ranks, count_cores()))
    _silence_elastic()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", MODULE, *argv)
    except ChildFailedError as error:
        return _report(error)
    except (SignalException, KeyboardInterrupt):
        _say("\nstopped; what was written so far is kept")
        return EXIT_INTERRUPTED
    return 0


def _silence_elastic() -> None:
    """Keep torchrun's own reports of ended ranks off the screen; ours are shorter."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _report(error: ChildFailedError) -> int:
    """Show the first failure and return the exit code."""
    cause = find_cause(error.failures)
    if cause.is_usage:
        _say(f"error: {cause.text}")
        return EXIT_USAGE
    _say(f"rank {cause.rank} failed, all ranks were ended:\n{cause.text}")
    return EXIT_FAILED


def _say(text: str) -> None:
    """Write to standard error; show the cursor again in case a progress bar hid it."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{show_cursor}{text.rstrip()}\n")
    sys.stderr.flush()
