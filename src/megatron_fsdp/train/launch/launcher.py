"""Starts the ranks of a run on this machine, restarts them when one died, ends them on the user's request.

The processes are those of torchrun (`torch.distributed.elastic.multiprocessing`). Its agent is left out: ranks of one
machine need no rendezvous, which would open a port on every interface. They find each other by a file and talk over the
loopback interface. Several machines are torchrun's own business (docs/training.md).
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.failures import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_KILLED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    LAUNCHER_VARIABLE,
    Failure,
    find_cause,
    tell,
)
from megatron_fsdp.train.launch.ranks import STORE_FILE_VARIABLE, loopback_interface

CPU_RANKS = 2
MODULE = "megatron_fsdp.train"
_POLL_S = 0.05
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun (or this launcher) started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def find_device_type(name: str) -> str:
    """Return the device type for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigurationError: That accelerator is not available.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if found is None else found.type
    if name == "auto":
        return available
    if name not in ("cpu", available):
        raise ConfigurationError(f"--device {name} is not available here: use --device {available}, or leave it out")
    return name


def choose_ranks(requested: int | None, *, num_accelerators: int, num_cores: int) -> int:
    """Return the number of ranks to start.

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
            f"--nproc {requested} needs as many accelerators and {num_accelerators} are here: "
            f"give at most {num_accelerators}, or --device cpu"
        )
    return requested if requested is not None else num_accelerators


def count_cores() -> int:
    """Return the number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(environment: Mapping[str, str], ranks: int, num_cores: int) -> dict[str, str]:
    """Return the environment variables to add for ranks: their share of the cores, and traffic on the loopback.

    Variables that the user has set are left alone.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores // ranks)), **loopback_interface()}
    return {name: value for name, value in wanted.items() if name not in environment}


def launch(argv: Sequence[str], ranks: int, max_restarts: int = 0) -> int:
    """Run this module once per rank, restart all when a rank died, and return the exit code.

    The first Ctrl-C or SIGTERM is passed on: ranks that have a folder to save to finish the step and save, the others
    end at once. The next Ctrl-C ends all at once.

    Args:
        argv: Options of the run.
        ranks: How many processes.
        max_restarts: How often all ranks may start again.
    """
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # we tell it
    heard = [number.name for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]  # not below nohup
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
    shared = {
        **rank_environment(os.environ, ranks, count_cores()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID") or _new_run_id(),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    processes: PContext | None = None
    with tempfile.TemporaryDirectory(prefix="mfsdp-run-") as folder:
        try:
            for restart in itertools.count():
                processes = _start(argv, restart, shared, folder)
                cause = _wait(processes)
                if cause is None:
                    return EXIT_DONE
                if restart == max_restarts or not cause.is_worth_repeating:
                    return _report(cause)
                tell(f"{_told(cause)}\nstarting all ranks again, {restart + 1} of at most {max_restarts} times")
        except SignalException as asked:
            return _stop(processes, asked.sigval)
    raise AssertionError("numbers do not end")


def _new_run_id() -> str:
    return f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"  # two runs may start in one second


def _start(argv: Sequence[str], restart: int, shared: Mapping[str, str], folder: str) -> PContext:
    """Start all ranks, each in its own session: signals of the terminal reach the launcher only."""
    ranks = range(int(shared["WORLD_SIZE"]))
    own = {"TORCHELASTIC_RESTART_COUNT": str(restart), STORE_FILE_VARIABLE: f"{folder}/store-{restart}"}
    environments = {rank: {**shared, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks}
    commands = dict.fromkeys(ranks, ("-m", MODULE, *argv))
    return start_processes("mfsdp", sys.executable, commands, environments, DefaultLogsSpecs(folder))


def _wait(processes: PContext) -> Failure | None:
    """Wait for the ranks, and end all when one failed; return the failure, or None if they ended well."""
    result = processes.wait(period=_POLL_S)
    return find_cause(result.failures) if result is not None and result.failures else None


def _stop(processes: PContext | None, number: signal.Signals) -> int:
    """Ask the ranks to save and end, and return the exit code; the next Ctrl-C ends them at once."""
    for other in (signal.SIGTERM, signal.SIGHUP):  # Slurm and torchrun may both send one
        signal.signal(other, signal.SIG_IGN)
    if processes is not None:  # else those that were started see that this process is gone
        try:
            for pid in processes.pids().values():  # by SIGTERM: while Python starts, SIGINT would show a traceback
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            cause = _wait(processes)
            if cause is not None and not cause.is_echo and cause.code != EXIT_KILLED:
                return _report(cause)
        except SignalException:
            processes.close(signal.SIGKILL)
    tell("stopped; what was written so far is kept")
    return 128 + signal.SIGINT if number == signal.SIGINT else EXIT_TERMINATED


def _told(cause: Failure) -> str:
    if cause.code == EXIT_FAILED:
        return f"rank {cause.rank} failed, all ranks were ended:\n{cause.text.rstrip()}"
    return f"rank {cause.rank}: {cause.text}"


def _report(cause: Failure) -> int:
    """Print the first failure and return the exit code."""
    tell(f"error: {cause.text}" if cause.code == EXIT_USAGE else _told(cause))
    return cause.code
