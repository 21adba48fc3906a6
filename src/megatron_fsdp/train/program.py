"""The program: starts the ranks, or is one of them; restarts all when one died, ends them on the user's request.

The processes are those of torchrun (`torch.distributed.elastic.multiprocessing`). Its agent is left out: ranks of one
machine need no rendezvous, which would open a port on every interface. They find each other by a file and talk over the
loopback interface. Several machines are torchrun's own business (docs/training.md).
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, start_processes

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.failures import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_KILLED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    LAUNCHER_VARIABLE,
    Failure,
    MachineLeftError,
    find_cause,
    let_go,
    report_failure,
    tell,
)
from megatron_fsdp.train.options.checks import check_environment, require_packages
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.options import Options
from megatron_fsdp.train.options.resolve import check_backend, resolve
from megatron_fsdp.train.ranks import STORE_FILE_VARIABLE, Rank, join_ranks, loopback_interface, reduce_values

_AFTER_HANG_MINUTES = 1.0
CPU_RANKS = 2
MODULE = "megatron_fsdp.train"
_POLL_S = 0.05
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    """Start the ranks and return the exit code, or run as one of them and end this process."""
    if not is_rank(os.environ):
        return start_ranks(argv)
    # Not by way of the interpreter: gloo's threads may hold tensors, and abort the process when they let go of these
    # after it has ended (pytorch/pytorch pull request 179291).
    os._exit(run_rank(argv))


def start_ranks(argv: Sequence[str]) -> int:
    """Check the options once, then start the ranks and wait for them."""
    try:
        options = parse_options(argv)
        device_type = find_device_type(options.parallel.device)
        num_accelerators = 0 if device_type == "cpu" else torch.accelerator.device_count()
        ranks = choose_ranks(options.parallel.nproc, num_accelerators=num_accelerators, num_cores=count_cores())
        resolve_here(options, ranks)
        require_packages(options)
    except ConfigurationError as error:
        tell(f"error: {error}")
        let_go()
        return EXIT_USAGE
    return launch(argv, ranks, options.recovery.max_restarts)


def run_rank(argv: Sequence[str]) -> int:
    """Train as one rank."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # end at once and quietly, even inside a collective
    with suppress(RuntimeError, OSError, ValueError):  # standard error may be closed
        faulthandler.enable()  # a rank that ends by SIGSEGV or SIGBUS shows its stacks
        signal.signal(signal.SIGABRT, signal.SIG_DFL)  # back ends raise it when a peer ends, with words of their own
    index = int(os.environ["RANK"])
    try:
        from megatron_fsdp.train.run_job import run_job  # the slow imports, which the launcher does not need

        options = parse_options(argv)
        parallel = options.parallel
        device_type = find_device_type(parallel.device)
        check_backend(options, device_type)
        with join_ranks(device_type, collective_timeout(options), parallel.distributed_backend) as rank:
            is_left = run_job(resolve_here(options, rank.count, agree_on_restarts(rank)), rank)
        if is_left:
            raise MachineLeftError("another machine was asked to end: saved, and to be started again without it")
    except Exception as error:  # noqa: BLE001  # the edge of the program: everything is reported
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which arrives when a peer has ended first: report the cause
        code = report_failure(error, index)
        let_go()
        os._exit(code)  # peers may be gone: do not wait for them in destructors
    let_go()
    return 0


def agree_on_restarts(rank: Rank) -> int:
    """All-reduce the largest number of restarts; a torchrun agent that returns counts anew."""
    told = float(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    (restarts,) = reduce_values(rank, [told], "max")
    return int(restarts)


def resolve_here(options: Options, ranks: int, restarts: int = 0) -> Job:
    """Resolve options to a job on this machine, with notices about its environment."""
    world = World(ranks, find_device_type(options.parallel.device), restarts)
    job = resolve(options, world)
    return replace(job, notices=(*job.notices, *check_environment(os.environ, job, world)))


def collective_timeout(options: Options) -> timedelta:
    """Return the time limit of a collective; longer than the hang limit, so that a hang is explained first."""
    minutes, hang = options.parallel.distributed_timeout_minutes, options.recovery.hang_timeout_minutes
    return timedelta(minutes=max(minutes, (minutes if hang is None else hang) + _AFTER_HANG_MINUTES))


# ---- the launcher ----------------------------------------------------------------------------------------------------


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun (or this launcher) started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def find_device_type(name: str) -> str:
    """Return the device type for `auto`, `cpu` or `cuda`."""
    found = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if found is None else found.type
    if name == "auto":
        return available
    if name not in ("cpu", available):
        raise ConfigurationError(f"--device {name} is not available here: use --device {available}, or leave it out")
    return name


def choose_ranks(requested: int | None, *, num_accelerators: int, num_cores: int) -> int:
    """Return the number of ranks to start: as requested, else one for each accelerator, or `CPU_RANKS`."""
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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # we tell it
    heard = [number.name for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]  # not below nohup
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
    run_id = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"  # two runs may start in one second
    shared = {
        **rank_environment(os.environ, ranks, count_cores()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID") or run_id,
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
