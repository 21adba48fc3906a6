"""Start the ranks of a measurement on this machine, and write their results."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.doctor.local_ranks import run_on_local_ranks
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.program import count_cores, rank_environment

_LIMIT_S = 3600.0
"""Time limit of a whole measurement, in seconds; callers have shorter ones."""

_KEEPS_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_MAX_": "0"}
"""Variables with which glibc keeps what was freed, as allocators of devices do. Else a step of any contender has
thousands of page faults or none, depending on what ran before in the process: up to 10 % of its time."""

_Found = TypeVar("_Found")
RankFunction = Callable[[Any, torch.device, DeviceMesh], Any]
"""Called on every rank with the request, the rank's device and a mesh of one dimension, "dp"; returns a reading."""


def measure_on_ranks(
    function: RankFunction,
    request: Any,
    ranks: int,
    *,
    threads: int | None = None,
    device_type: str = "cpu",
    simulated_ranks: int = 0,
) -> list[Any]:
    """Run a function on every rank and return the results.

    The function is at the top of a module and the request travels as a pickle; None `threads`: a fair share of the
    cores. `simulated_ranks` is the size of the job that one process pretends to be the first rank of; 0: none.
    """
    os.environ.update(rank_environment(os.environ, ranks, count_cores()) | _KEEPS_FREED_MEMORY)
    share = int(os.environ["OMP_NUM_THREADS"]) if threads is None else threads
    job = (function, request, share, simulated_ranks)
    return run_on_local_ranks(_measure_here, job, ranks, device_type, _LIMIT_S)


def _measure_here(job: tuple[RankFunction, Any, int, int], device_type: str | None) -> list[Any]:
    """Measure on this rank, or as the first of many with simulated collectives."""
    function, request, threads, simulated_ranks = job
    torch.set_num_threads(threads)
    torch.set_flush_denormal(bool(simulated_ranks))  # what simulated ranks receive is whatever lies in memory
    device = torch.device("cpu")
    if device_type is not None and device_type != "cpu":
        device = torch.device(device_type, torch.accelerator.current_device_index())
        torch.empty(0, device=device)  # a mesh of more ranks than devices is taken only from a device in use
    if simulated_ranks:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=simulated_ranks)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    reading = function(request, device, mesh)
    return [reading] if simulated_ranks else gather_objects(reading)


def finish_queued_work(device: torch.device) -> None:
    """Synchronise a device; the CPU is never behind."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(act: Callable[[], _Found], device: torch.device) -> tuple[_Found, float, float]:
    """Run a function after a barrier of all ranks; return its result, wall seconds and CPU seconds.

    CPU time is the host's until it has asked for everything, wall time until the device has done it.
    """
    finish_queued_work(device)
    if dist.get_backend() != "fake":
        dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = act()
    cpu_s = time.process_time() - cpu_s
    finish_queued_work(device)
    return found, time.perf_counter() - wall_s, cpu_s


def describe_machine(device_type: str, ranks: int) -> dict[str, str]:
    """Return date, versions and hardware of a run on "cpu" or, with a device for each rank, on "cuda"."""
    hardware = f"{count_cores()} CPU cores ({platform.machine()}), {platform.system()}"
    if device_type == "cuda":
        hardware += f", {ranks} x {torch.cuda.get_device_name(0)}"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": f"megatron-fsdp {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "hardware": hardware,
    }


def write_document(document: Mapping[str, Any], file: Path | None) -> None:
    """Write a document as JSON, if a file is given, with six significant digits of every float."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(shortened(document)) + "\n", encoding="utf-8")


def shortened(value: Any) -> Any:
    """Return the document with six significant digits of every float, more than any measurement has."""
    if isinstance(value, Mapping):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
