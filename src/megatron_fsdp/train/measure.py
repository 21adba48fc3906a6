"""What a run measures: its progress, losses, speed, memory and traffic."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.precision import ResolvedPrecision
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.optim.adamw8bit import AdamW8bit
from megatron_fsdp.optim.chained import members_of
from megatron_fsdp.plan.machine import MACHINES
from megatron_fsdp.plan.setup import EIGHT_BIT, OPTIMIZERS, Piece
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


def planned_optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Compute what `optimizer_bytes` counts after a step, by the planner's kinds of optimizers.

    Args:
        optimizer: As `build_optimizer` makes it, connected to this package's engine: alone, chained or wrapped.
    """
    total = 0
    for each in members_of(getattr(optimizer, "inner_optimizer", optimizer)):
        for group in each.param_groups:
            kind = OPTIMIZERS[_kind_name(each, group)]
            for param in group["params"]:
                assert isinstance(param, UnevenDTensor)
                precision = ResolvedPrecision(*(param.dtype,) * 4, has_main_copy=False)
                piece = Piece("", *param.shard_frame.description.local_range, precision)
                total += kind.state_bytes(piece) - kind.counter_bytes
    return total


def _kind_name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    if isinstance(optimizer, torch.optim.SGD):
        return "momentum" if group["momentum"] else "sgd"
    if isinstance(optimizer, torch.optim.Muon):
        return "momentum"  # of its matrices, while the kind of that name stands for a chain
    return EIGHT_BIT if isinstance(optimizer, AdamW8bit) else "adamw"


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
    """A measured value of this rank beside what the formula says."""

    what: str
    measured: int
    formula: int


def compare(trained: Trained, step: Traffic | None, microbatches: int) -> tuple[Row, ...]:
    """Compare gathers, bytes sent and memory of an optimizer step with the formulas of `sharding/accounting.py`.

    Optimizer state is that of the planner's kinds. Empty with an engine that counts nothing, and without a step.
    """
    model = trained.inside
    if model is None or step is None:
        return ()
    syncs = 1 if trained.defers else microbatches
    memory, groups, strategy = model.memory(), model.footprints(), model.resolved.strategy
    exchanges = any(group.exchanges_inner for group in model.parameter_groups())  # no native reduce-scatter
    scratch = exchange_scratch_bytes(groups, strategy) if exchanges else 0
    held = persistent_bytes(groups, strategy, optimizer_states_per_param=0)
    borrowed = transient_bytes(groups, strategy, scratch_bytes=scratch)
    inside, across = step_traffic(groups, strategy, syncs), outer_step_traffic(groups, strategy)
    sent = inside.gather_bytes + across.gather_bytes + inside.reduce_bytes + syncs * across.reduce_bytes
    used = memory.persistent_bytes + memory.transient_peak_bytes + optimizer_bytes(trained.optimizer)
    planned = held.total + planned_optimizer_bytes(trained.optimizer) + borrowed.total
    return (
        Row("gathers per step", step.gathers, inside.gathers + across.gathers),
        Row("bytes sent per step", step.gather_bytes + step.reduce_bytes, sent),
        Row("peak bytes of weights, gradients, optimizer, communication", used, planned),
    )
