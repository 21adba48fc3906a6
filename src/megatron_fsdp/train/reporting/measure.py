"""Measurements of a run on its machine: peak FLOPs, memory, exposed communication, and their formulas."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.plan.machine import MACHINES
from megatron_fsdp.sharding.accounting import (
    exchange_scratch_bytes,
    outer_step_traffic,
    persistent_bytes,
    step_traffic,
    transient_bytes,
)
from megatron_fsdp.trace.recorder import Recorder
from megatron_fsdp.trace.summary import summarise
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.launch.ranks import Rank, reduce_values
from megatron_fsdp.train.options.job import Job

_MEASURED_S = 0.15
_SIDE = 512  # of the matrices that are multiplied on a CPU: large enough for its best speed


@dataclass(frozen=True)
class Peak:
    """The peak compute rate of one rank's hardware.

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
    """Return the maker's figure for a device's dense 16-bit matrix products; NaN for other dtypes and devices."""
    words = device_name.lower().replace("-", " ").split()
    machine = next((machine for name, machine in MACHINES.items() if name in words), None)
    if machine is None:
        return Peak(math.nan, f"not known for {device_name}; --peak-tflops tells it")
    if dtype.itemsize != 2:
        return Peak(math.nan, f"not known for {str(dtype).removeprefix('torch.')}; --peak-tflops tells it")
    return Peak(machine.flops / 1e12, f"the maker's figure for {machine.name}, dense, 16 bit")


def measure_cpu(dtype: torch.dtype) -> float:
    """Multiply matrices for a moment with this process's threads; return 10^12 operations per second (the median)."""
    left, right = (torch.full((_SIDE, _SIDE), 0.5, dtype=dtype) for _ in range(2))
    result = left @ right  # the first one makes room and starts threads
    times: list[float] = []
    end_s = time.perf_counter() + _MEASURED_S
    while not times or time.perf_counter() < end_s:
        started_s = time.perf_counter()
        torch.mm(left, right, out=result)
        times.append(time.perf_counter() - started_s)
    return 2.0 * _SIDE**3 / statistics.median(times) / 1e12


def peak_bytes(trained: Trained) -> int:
    """Return this rank's peak memory so far: all allocations of an accelerator; on a CPU, see `describe_peak`.

    The CPU allocator keeps no statistics, and the resident size of a process says more about malloc than about tensors.
    """
    if trained.device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(trained.device))
    held = optimizer_bytes(trained.optimizer)
    if trained.inside is None:  # gradients are as large as weights while there are any
        return held + sum(2 * _local(p).nbytes for p in trained.model.parameters() if p.requires_grad)
    memory = trained.inside.memory()
    return memory.persistent_bytes + memory.transient_peak_bytes + held


def describe_peak(trained: Trained) -> str:
    """Describe what `peak_bytes` counts with this engine on this device."""
    if trained.device.type != "cpu":
        return "all allocations on the device"
    if trained.inside is None:
        return "shards of weights and gradients, optimizer; no communication, no activations"
    return "weights, gradients, optimizer, communication; no activations"


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of optimizer state on this rank, without step counters (one number each)."""
    found = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(_local(tensor).nbytes for tensor in found if tensor.ndim > 0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ExposedCommunication:
    """Records a step now and then by `trace`; does nothing with an engine that cannot be observed."""

    def __init__(self, trained: Trained, *, is_wanted: bool) -> None:
        """Measure how long a step waits for communication, if `is_wanted`."""
        self._model = trained.inside if is_wanted else None
        self._device = trained.device
        self._recorder: Recorder | None = None
        self._step_s = math.nan

    @contextmanager
    def step(self, *, is_measured: bool) -> Iterator[None]:
        """Record the step inside the block if `is_measured`; results stay bitwise equal."""
        if self._model is None or not is_measured:
            yield
            return
        recorder = Recorder(self._model, steps=2, align=False, memory=False)
        recorder.start()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            recorder.stop()
        self._recorder, self._step_s = recorder, time.perf_counter() - started_s

    def take_share(self) -> float:
        """Return exposed communication over the time of the step that was recorded last, as a mean over ranks.

        Collective. Exposed is the time in which communication was in flight and this rank did nothing but wait for it
        or, on a CPU, launch it (`megatron_fsdp.trace.summary.hidden_part`).

        Returns:
            From 0 to 1; NaN where nothing was recorded since the last call.
        """
        if self._recorder is None:
            return math.nan
        exposed_ns = sum(step.exposed_ns for step in summarise(self._recorder.result()).steps)
        self._recorder = None
        share = Tensor([exposed_ns / 1e9 / self._step_s]).to(self._device)
        dist.all_reduce(share)
        return float(share) / dist.get_world_size()


@dataclass(frozen=True)
class Row:
    """One line of the comparison of measured with computed values.

    Attributes:
        what: What is compared.
        unit: `bytes` or `count`.
        measured: What the run used.
        formula: What the formula says.
    """

    what: str
    unit: str
    measured: int
    formula: int

    @property
    def ratio(self) -> float:
        """Measured over formula; 1 where both are 0."""
        if self.formula == 0:
            return 1.0 if self.measured == 0 else float("inf")
        return self.measured / self.formula


def compare(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: Traffic, microbatches: int
) -> tuple[Row, ...]:
    """Compare what this rank used with the formulas of `sharding/accounting.py`.

    Args:
        model: Wrapped by this package.
        optimizer: Of the model.
        step: Collectives of one optimizer step.
        microbatches: Per optimizer step.
    """
    memory, groups, strategy = model.memory(), model.footprints(), model.resolved.strategy
    held = persistent_bytes(groups, strategy)
    exchanges = any(group.exchanges_inner for group in model.parameter_groups())  # no native reduce-scatter
    scratch = exchange_scratch_bytes(groups, strategy) if exchanges else 0
    borrowed = transient_bytes(groups, strategy, scratch_bytes=scratch)
    # The trainer puts off the reductions of strategies without sharded gradients; others sync after each microbatch.
    syncs = 1 if strategy <= ShardingStrategy.optim else microbatches
    inside, across = step_traffic(groups, strategy, syncs), outer_step_traffic(groups, strategy)
    gathers, gather_bytes = inside.gathers + across.gathers, inside.gather_bytes + across.gather_bytes
    reductions = inside.reductions + syncs * across.reductions
    reduce_bytes = inside.reduce_bytes + syncs * across.reduce_bytes
    return (
        Row("weights and gradients", "bytes", memory.persistent_bytes, held.total - held.optimizer),
        Row("optimizer state", "bytes", optimizer_bytes(optimizer), held.optimizer),
        Row("gathered weights and buckets, peak", "bytes", memory.transient_peak_bytes, borrowed.total),
        Row("gathers per step", "count", step.gathers, gathers),
        Row("sent in gathers per step", "bytes", step.gather_bytes, gather_bytes),
        Row("reductions per step", "count", step.reductions, reductions),
        Row("sent in reductions per step", "bytes", step.reduce_bytes, reduce_bytes),
    )
