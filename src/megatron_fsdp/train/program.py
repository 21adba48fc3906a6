"""The program: starts the ranks, or is one of them."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require_installed
from megatron_fsdp.train.launch.failures import EXIT_USAGE, MachineLeftError, let_go, report_failure, tell
from megatron_fsdp.train.launch.launcher import choose_ranks, count_cores, find_device_type, is_rank, launch
from megatron_fsdp.train.launch.ranks import Rank, join_ranks, reduce_values
from megatron_fsdp.train.options.checks import check_environment, needs_transformers
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.options import Options
from megatron_fsdp.train.options.resolve import check_backend, resolve
from megatron_fsdp.train.reporting.writers import require_writers

_AFTER_HANG_MINUTES = 1.0


def main(argv: Sequence[str]) -> int:
    """Start the ranks, or run as one of them; return the exit code."""
    return run_rank(argv) if is_rank(os.environ) else start_ranks(argv)


def start_ranks(argv: Sequence[str]) -> int:
    """Check the options once, then start the ranks and wait for them."""
    try:
        options = parse_options(argv)
        device_type = find_device_type(options.parallel.device)
        num_accelerators = 0 if device_type == "cpu" else torch.accelerator.device_count()
        ranks = choose_ranks(options.parallel.nproc, num_accelerators=num_accelerators, num_cores=count_cores())
        resolve_here(options, ranks)
        require_writers(options.reporting)
        if (flag := needs_transformers(options)) is not None:
            require_installed("transformers", flag)
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
    world = world_of(options, ranks, restarts)
    job = resolve(options, world)
    return replace(job, notices=(*job.notices, *check_environment(os.environ, job, world)))


def collective_timeout(options: Options) -> timedelta:
    """Return the time limit of a collective; longer than the hang limit, so that a hang is explained first."""
    minutes, hang = options.parallel.distributed_timeout_minutes, options.recovery.hang_timeout_minutes
    return timedelta(minutes=max(minutes, (minutes if hang is None else hang) + _AFTER_HANG_MINUTES))


def world_of(options: Options, ranks: int, restarts: int = 0) -> World:
    """Describe the ranks, how often they were started again, and the hardware of this process.

    Raises:
        ConfigurationError: The device that was asked for is not here.
    """
    device_type = find_device_type(options.parallel.device)
    multiplies_bf16 = device_type != "cpu" or cpu_multiplies_bf16()
    return World(ranks, device_type, multiplies_bf16, restarts)


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has bfloat16 instructions; without them bf16 is slower than fp32."""
    read_capabilities = getattr(torch.cpu, "get_capabilities", None)  # younger than the oldest torch we run on
    capabilities = {} if read_capabilities is None else read_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
