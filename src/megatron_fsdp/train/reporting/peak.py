"""What one rank's hardware could compute at best, for the share of it that a run reaches."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_fsdp.plan.machine import MACHINES
from megatron_fsdp.train.launch.ranks import Rank, reduce_values
from megatron_fsdp.train.options.job import Job

MEASURED_S = 0.15
SIDE = 512  # of the matrices that are multiplied on a CPU: large enough for its best speed


@dataclass(frozen=True)
class Peak:
    """What one rank could do.

    Attributes:
        tflops: 10^12 operations per second; NaN: not known.
        source: Where the number is from, in words.
    """

    tflops: float
    source: str


def find_peak(job: Job, rank: Rank) -> Peak:
    """Return the peak of a rank; collective, the same on every rank.

    On a CPU all ranks measure at the same time, since they share its cores; the mean over ranks counts.
    """
    given = job.options.reporting.peak_tflops
    if given is not None:
        return Peak(given, "--peak-tflops")
    if rank.device.type == "cpu":
        dist.barrier()
        (total,) = reduce_values(rank, [measure_cpu(job.dtype)], "sum")
        return Peak(total / rank.count, "measured on matrix products")
    return peak_by_name(str(torch.get_device_module(rank.device).get_device_name(rank.device)), job.dtype)


def peak_by_name(device_name: str, dtype: torch.dtype) -> Peak:
    """Return what the maker says of a device's dense 16-bit matrix products; not known for other dtypes and devices."""
    words = device_name.lower().replace("-", " ").split()
    machine = next((machine for name, machine in MACHINES.items() if name in words), None)
    if machine is None:
        return Peak(math.nan, f"not known for {device_name}; --peak-tflops tells it")
    if dtype.itemsize != 2:
        return Peak(math.nan, f"not known for {str(dtype).removeprefix('torch.')}; --peak-tflops tells it")
    return Peak(machine.flops / 1e12, f"the maker's figure for {machine.name}, dense, 16 bit")


def measure_cpu(dtype: torch.dtype) -> float:
    """Multiply matrices for a moment with this process's threads; return 10^12 operations per second (the median)."""
    left, right = (torch.full((SIDE, SIDE), 0.5, dtype=dtype) for _ in range(2))
    result = left @ right  # the first one makes room and starts threads
    times: list[float] = []
    end_s = time.perf_counter() + MEASURED_S
    while not times or time.perf_counter() < end_s:
        started_s = time.perf_counter()
        torch.mm(left, right, out=result)
        times.append(time.perf_counter() - started_s)
    return 2.0 * SIDE**3 / statistics.median(times) / 1e12
