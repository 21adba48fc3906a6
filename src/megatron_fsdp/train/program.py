"""The program: runs as one of the ranks, or starts them by torch's elastic agent, which is that of torchrun.

Ranks that are started here find each other by a file and communicate over the loopback interface, so no port is open to
other machines. Several machines need torchrun (docs/training.md).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_fsdp.config.command_parser import EXIT_INTERRUPTED
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.failures import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    MEETING_VARIABLE,
    find_cause,
    report_failure,
    tell,
)
from megatron_fsdp.train.options import Options
from megatron_fsdp.train.options.checks import require_there
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World, check_backend, check_environment, resolve
from megatron_fsdp.train.ranks import join_ranks, loopback_interface, restarts_so_far

CPU_RANKS = 2
MODULE = "megatron_fsdp.train"
_POLL_S = 0.05
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the last is Slurm's warning


def main(argv: Sequence[str]) -> int:
    """Start the ranks and return the exit code, or run as one of them and end this process."""
    if not is_rank(os.environ):
        return start_ranks(argv)
    code = run_rank(argv)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, full, or without a reader
            stream.flush()
    # Not by way of the interpreter: gloo's threads may hold tensors, and abort the process when they let go of these
    # after it has ended (pytorch/pytorch pull request 179291); after an error destructors would wait for lost peers.
    os._exit(code)


def run_rank(argv: Sequence[str]) -> int:
    """Train as one rank, and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # end at once and quietly, even inside a collective
    with suppress(RuntimeError, OSError, ValueError):  # standard error may be closed
        faulthandler.enable()  # a rank that ends by SIGSEGV or SIGBUS shows its stacks
        signal.signal(signal.SIGABRT, signal.SIG_DFL)  # back ends raise it when a peer ends, with words of their own
    try:
        from megatron_fsdp.train.run_job import run_job  # the slow imports, which the launcher does not need

        options = parse_options(argv)
        device_type = find_device_type(options.parallel.device)
        check_backend(options, device_type)
        timeout = timedelta(minutes=options.parallel.distributed_timeout_minutes)
        with join_ranks(device_type, timeout, options.parallel.distributed_backend) as rank:
            run_job(resolve_here(options, rank.count, restarts_so_far(rank)), rank)
    except Exception as error:  # noqa: BLE001  # the edge of the program: everything is reported
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which arrives when a peer has ended first: report the cause
        return report_failure(error, int(os.environ["RANK"]))
    return EXIT_DONE


def resolve_here(options: Options, ranks: int, restarts: int = 0) -> Job:
    """Resolve options to a job on this machine, with warnings about its environment."""
    world = World(ranks, find_device_type(options.parallel.device), restarts)
    job = resolve(options, world)
    return replace(job, notes=(*job.notes, *check_environment(os.environ, job, world)))


# ---- the launcher ----------------------------------------------------------------------------------------------------


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return True if torchrun (or this launcher) started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def start_ranks(argv: Sequence[str]) -> int:
    """Check the options once, then start the ranks and wait for them."""
    try:
        options = parse_options(argv)
        device_type = find_device_type(options.parallel.device)
        num_accelerators = 0 if device_type == "cpu" else torch.accelerator.device_count()
        ranks = choose_ranks(options.parallel.nproc, num_accelerators=num_accelerators, num_cores=count_cores())
        resolve_here(options, ranks)
        require_there(options)
    except ConfigurationError as error:
        tell(f"error: {error}")
        return EXIT_USAGE
    return launch(argv, ranks, options.recovery.max_restarts)


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

    The user's own variables are kept.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores // ranks)), **loopback_interface()}
    return {name: value for name, value in wanted.items() if name not in environment}


def launch(argv: Sequence[str], ranks: int, max_restarts: int = 0) -> int:
    """Run this module once per rank by torch's elastic agent, and return the exit code.

    As under torchrun a signal is passed on, and ranks with a folder for saves finish the step and save.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID") or f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"
    heard = [number.name for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]  # not below nohup
    # Of the agent's own words only those about failures that are followed by a restart are news.
    logging.disable(logging.WARNING if max_restarts else logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="mfsdp-run-") as folder:
        os.environ |= rank_environment(os.environ, ranks, count_cores())
        os.environ[MEETING_VARIABLE] = Path(folder, "ranks").as_uri()
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a store that listens on every interface
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(folder),
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder, "agent")),
            rdzv_configs={"store_type": "file"},
            max_restarts=max_restarts,
            monitor_interval=_POLL_S,
            local_addr="localhost",
            signals_to_handle=",".join(heard),
        )
        try:
            elastic_launch(config, sys.executable)("-m", MODULE, *argv)
        except ChildFailedError as error:
            cause = find_cause(error.failures)
            also = ", all ranks were ended" if cause.code == EXIT_FAILED else ""
            tell(f"error: {cause.text}" if cause.code == EXIT_USAGE else f"rank {cause.rank}{also}: {cause.text}")
            return cause.code
        except (SignalException, KeyboardInterrupt) as asked:
            tell("stopped; what was written so far is kept")
            is_interrupt = getattr(asked, "sigval", signal.SIGINT) == signal.SIGINT
            return EXIT_INTERRUPTED if is_interrupt else EXIT_TERMINATED
    return EXIT_DONE
