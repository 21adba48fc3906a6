"""What a run measures: its progress, losses, speed, memory and traffic."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.plan.compute_profile import idle_profile
from megatron_fsdp.plan.machine import MACHINES
from megatron_fsdp.plan.muon import muon_matrices
from megatron_fsdp.plan.replay import replay_step
from megatron_fsdp.plan.setup import MUON, OPTIMIZERS, ParallelRanks, Setup
from megatron_fsdp.plan.sharded import PlannedModel, PlannedUnit, held_bytes
from megatron_fsdp.plan.sharded import optimizer_bytes as plan_optimizer_bytes
from megatron_fsdp.trace.recorder import Recorder
from megatron_fsdp.trace.summary import summarise
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.options.job import Job


@dataclass(frozen=True)
class Progress:
    """How far training is, earlier runs included."""

    steps: int = 0  # done, skipped ones included
    samples: int = 0
    skipped: int = 0  # since loss or gradient was not finite
    elapsed_s: float = 0.0  # in steps; no evaluations and saves


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; NaN stands for what is not known or was not asked for."""

    step: int  # from 1
    samples: int  # consumed so far
    loss: float  # over all ranks and microbatches, in nats per token
    grad_norm: float  # of the whole gradient before clipping
    learning_rate: float
    skipped: int  # steps so far, since their loss or gradient was not finite
    data_checksum: int  # the same for any number of ranks
    tokens_per_s: float = math.nan  # of all ranks, in this step
    step_s: float = math.nan
    peak_bytes: int = 0  # largest peak of any rank so far
    elapsed_s: float = math.nan  # earlier runs included
    tflops: float = math.nan  # per rank, in this step
    mfu: float = math.nan  # model FLOPs utilization: the share of what the hardware could do
    exposed_share: float = math.nan  # of the time of this step, in which ranks waited for communication
    loss_scale: float = 1.0  # factor of the loss for backward
    params_norm: float = math.nan  # of all weights after this step
    num_zeros_in_grad: float = math.nan
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of gradients and weights, by unit


@dataclass(frozen=True)
class Evaluation:
    """The mean loss on held-out text, in nats per token, after a number of steps."""

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        """Perplexity; infinite if it does not fit into a float."""
        return math.exp(self.loss) if self.loss < 700 else self.loss * math.inf


@dataclass(frozen=True)
class Speed:
    """The work of a step and the hardware's peak, to compute speeds from the time of a step."""

    tokens: int  # of all ranks, without those that only fill up
    flops: float = math.nan  # of these tokens, forward and backward, over all ranks; NaN: not known
    ranks: int = 1  # all, whatever they cut
    peak_tflops: float = math.nan  # of one rank; NaN: not known

    def tokens_per_s(self, step_s: float) -> float:
        """Return tokens of all ranks per second, for a step of `step_s` seconds."""
        return self.tokens / step_s

    def tflops(self, step_s: float) -> float:
        """Return 10^12 operations per second and rank; NaN: not known."""
        return self.flops / step_s / self.ranks / 1e12

    def mfu(self, step_s: float) -> float:
        """Return model FLOPs utilization (Chowdhery et al. 2022, PaLM), the share of the peak; NaN: not known."""
        return self.tflops(step_s) / self.peak_tflops


def peak_tflops(job: Job, device: torch.device) -> float:
    """Return `--peak-tflops`, or the maker's figure for the device's dense 16-bit products; NaN: not known."""
    given = job.options.reporting.peak_tflops
    if given is not None:
        return given
    if device.type == "cpu" or job.dtype.itemsize != 2:
        return math.nan
    return peak_by_name(str(torch.get_device_module(device).get_device_name(device)))


def peak_by_name(device_name: str) -> float:
    """Return 10^12 operations per second of a device's dense 16-bit matrix products; NaN: not known."""
    words = device_name.lower().replace("-", " ").split()
    return next((machine.flops / 1e12 for name, machine in MACHINES.items() if name in words), math.nan)


def peak_bytes(trained: Trained) -> int:
    """Return this rank's peak memory so far: all allocations of an accelerator; on a CPU, see `describe_peak`.

    The CPU allocator keeps no statistics, and the resident size of a process says more about malloc than about tensors.
    """
    if trained.device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(trained.device))
    if trained.inside is None:  # gradients are as large as weights while there are any
        return optimizer_bytes(trained.optimizer) + sum(
            2 * _local(p).nbytes for p in trained.model.parameters() if p.requires_grad
        )
    return _bytes_on_device(trained.inside, trained.optimizer)


def _bytes_on_device(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    """Count what the engine holds at its peak, and the optimizer, but for what rests elsewhere."""
    memory = model.memory()
    held = optimizer_bytes(optimizer) - memory.away.get("optimizer_state", 0)
    return memory.persistent_bytes + memory.transient_peak_bytes + held


def describe_peak(trained: Trained) -> str:
    """Describe what `peak_bytes` counts with this engine on this device."""
    if trained.device.type != "cpu":
        return "all allocations on the device"
    if trained.inside is None:
        return "shards of weights and gradients, optimizer; no communication, no activations"
    return "weights, gradients, optimizer, communication; no activations"


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of optimizer state on this rank, step counters included."""
    found = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(_local(tensor).nbytes for tensor in found)


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
        """Return exposed communication over the time of the step recorded last, as a mean over ranks; collective.

        Exposed is the time in which communication was in flight and this rank did nothing but wait for it or, on a
        CPU, launch it (`megatron_fsdp.trace.summary.hidden_part`). NaN: nothing was recorded since the last call.
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
    """A measured value of this rank beside what the planner says."""

    what: str
    measured: int
    formula: int


def compare(trained: Trained, step: Traffic | None, job: Job) -> tuple[Row, ...]:
    """Compare gathers, bytes sent and memory of an optimizer step with what the planner says of the same model.

    Optimizer state is that of the planner's kinds. Empty with an engine that counts nothing, and without a step.
    """
    model = trained.inside
    if model is None or step is None:
        return ()
    planned = as_planned(model, job, defers=trained.defers)
    names = [
        [info.name for plan in unit.groups for info in plan.spec.parameters if plan.requires_grad]
        for unit in planned.units
    ]
    replayed = replay_step(planned, idle_profile(names), MACHINES["h100"])
    used = _bytes_on_device(model, trained.optimizer)
    told = sum(held_bytes(planned.groups)) + plan_optimizer_bytes(planned) + replayed.borrowed_bytes
    sent = sum(each.sent_bytes for each in replayed.transfers)
    return (
        Row("gathers per step", step.gathers, sum(each.is_gather for each in replayed.transfers)),
        Row("bytes sent per step", step.gather_bytes + step.reduce_bytes, sent),
        Row("peak bytes of weights, gradients, optimizer, communication", used, told),
    )


def as_planned(model: DistributedDataParallel, job: Job, *, defers: bool) -> PlannedModel:
    """Return a wrapped model as the planner would have made it, with the groups and the memory that it has."""
    engine, resolved, optimizer = model._engine, model.resolved, job.options.optimizer
    *outer_axes, inner = (axis.num_ranks for axis in engine.sharding.dense.axes)
    outer = outer_axes[0] if outer_axes else 1
    setup = Setup(
        ParallelRanks(inner, outer),
        resolved.strategy,
        resolved.outer_strategy if outer > 1 else ShardingStrategy.no_shard,
        microbatches=job.batch.microbatches,
        accumulation="last" if defers else "every",
        optimizer=OPTIMIZERS[optimizer.planned_name],
        backend="gloo" if any(group.exchanges_inner for group in engine.groups()) else "nccl",
    )
    units = tuple(
        PlannedUnit(str(unit.index), "", (str(unit.index),), tuple(group.plan for group in unit.groups))
        for unit in engine.units
    )
    matrices = muon_matrices(model.module) if setup.optimizer.name == MUON else {}
    return PlannedModel(setup, units, "as wrapped", engine.memory_plan, matrices)
