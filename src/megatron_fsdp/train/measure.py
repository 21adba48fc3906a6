"""The measurements of a run: its progress, losses, speed and memory; and the names and formats of figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.plan.machine import MACHINES
from megatron_fsdp.trace.recorder import Recorder
from megatron_fsdp.trace.summary import summarise
from megatron_fsdp.train.models.trained import Trained
from megatron_fsdp.train.options.job import Job


@dataclass(frozen=True)
class Progress:
    """The progress of training, earlier runs included."""

    steps: int = 0  # done, skipped ones included
    samples: int = 0
    skipped: int = 0  # since loss or gradient was not finite
    elapsed_s: float = 0.0  # in steps; no evaluations and saves


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; NaN: not known or not requested."""

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
    mfu: float = math.nan  # model FLOPs utilization: the share of the hardware's peak
    exposed_share: float = math.nan  # of the time of this step, in which ranks waited for communication
    loss_scale: float = 1.0  # factor of the loss for backward
    params_norm: float = math.nan  # of all weights after this step
    num_zeros_in_grad: float = math.nan
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of gradients and weights, by unit


class Figure(NamedTuple):
    """One figure of a step."""

    field: str  # of `StepRecord`
    tracker_name: str  # Megatron-LM's where it has one
    label: str = ""  # on the console; empty: it is not shown there
    show: Callable[[float], str] = str

    def of(self, record: StepRecord) -> float | None:
        """Return the value; None if it is not known. A loss or norm that is NaN is known to be."""
        value = float(getattr(record, self.field))
        return None if math.isnan(value) and self.field not in ("loss", "grad_norm") else value


FIGURES = (
    Figure("loss", "lm loss", "loss", "{:.3f}".format),
    Figure("skipped", "skipped-iterations", "skipped", "{:.0f}".format),
    Figure("mfu", "mfu", "MFU", "{:.1%}".format),
    Figure("tokens_per_s", "tokens-per-second", "tokens/s", "{:,.0f}".format),
    Figure("grad_norm", "grad-norm", "norm", "{:.2f}".format),
    Figure("peak_bytes", "mem-peak-bytes", "memory", lambda value: in_bytes(int(value))),
    Figure("exposed_share", "exposed-communication", "exposed comm", "{:.1%}".format),
    Figure("learning_rate", "learning-rate", "lr", "{:.2e}".format),
    Figure("tflops", "throughput"),
    Figure("step_s", "iteration-time"),
    Figure("loss_scale", "loss-scale"),
    Figure("samples", "consumed-samples"),
    Figure("params_norm", "params-norm"),
    Figure("num_zeros_in_grad", "num-zeros"),
)
"""In the order in which a line of the console has them, as far as they fit."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss on held-out text, in nats per token, after a number of steps."""

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        """The perplexity; infinite if it does not fit into a float."""
        return math.exp(self.loss) if self.loss < 700 else self.loss * math.inf


class Writer:
    """Takes measurements, and shows or stores them; a base class that does nothing."""

    def start(self, progress: Progress) -> None:
        """Begin, or resume: records of later steps are dropped, since these steps run again."""

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        """Record the steps since the last call, at least one."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Record a held-out loss."""

    def close(self) -> None:
        """Write the remaining records, and close."""


# ---- speed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """The work of a step and the hardware's peak, to compute speeds from the time of a step."""

    tokens: int  # of all ranks, without those that only fill up
    flops: float = math.nan  # of these tokens, forward and backward, over all ranks; NaN: not known
    ranks: int = 1  # all, whatever they cut
    peak_tflops: float = math.nan  # of one rank; NaN: not known

    def timed(self, record: StepRecord, step_s: float, elapsed_s: float) -> StepRecord:
        """Add times and speeds to a step of `step_s` seconds; training has taken `elapsed_s` with it.

        MFU is model FLOPs utilization (Chowdhery et al. 2022, PaLM), the share of the peak.
        """
        tflops, tokens = self.flops / step_s / self.ranks / 1e12, self.tokens / step_s
        mfu = tflops / self.peak_tflops
        return replace(record, step_s=step_s, elapsed_s=elapsed_s, tokens_per_s=tokens, tflops=tflops, mfu=mfu)


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


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(trained: Trained) -> int:
    """Return this rank's peak memory so far: all allocations of an accelerator; on a CPU, see `describe_peak`.

    The CPU allocator keeps no statistics, and the resident size of a process says more about malloc than about tensors.
    """
    if trained.device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(trained.device))
    held = optimizer_bytes(trained.optimizer)
    if trained.inside is None:  # gradients are as large as weights while there are any
        return held + sum(2 * local_tensor(p).nbytes for p in trained.model.parameters() if p.requires_grad)
    memory = trained.inside.memory()
    return memory.persistent_bytes + memory.transient_peak_bytes + held - memory.offloaded.get("optimizer_state", 0)


def describe_peak(trained: Trained) -> str:
    """Describe the contents of `peak_bytes` with this engine on this device."""
    if trained.device.type != "cpu":
        return "all allocations on the device"
    if trained.inside is None:
        return "shards of weights and gradients, optimizer; no communication, no activations"
    return "weights, gradients, optimizer, communication; no activations"


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of optimizer state on this rank, step counters included."""
    states = (optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"])
    found = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(local_tensor(tensor).nbytes for tensor in found)


# ---- communication ---------------------------------------------------------------------------------------------------


@contextmanager
def recording_waits(trained: Trained, *, is_wanted: bool) -> Iterator[Callable[[], float]]:
    """Record the step inside the block by `trace`, if wanted and the engine can be observed; no bit of it changes.

    It yields a function that returns, after the block, exposed communication over the time of the step, as a mean over
    ranks; collective. Exposed is the time in which communication was in flight and this rank only waited for it or, on
    a CPU, launched it (`megatron_fsdp.trace.summary.hidden_part`). NaN: nothing was recorded.
    """
    model = trained.inside if is_wanted else None
    if model is None:
        yield lambda: math.nan
        return
    recorder, step_s = Recorder(model, steps=2, align=False, memory=False), math.nan

    def exposed_share() -> float:
        exposed_ns = sum(step.exposed_ns for step in summarise(recorder.result()))
        share = Tensor([exposed_ns / 1e9 / step_s]).to(trained.device)
        dist.all_reduce(share)
        return float(share) / dist.get_world_size()

    recorder.start()
    started_s = time.perf_counter()
    try:
        yield exposed_share
    finally:
        recorder.stop()
    step_s = time.perf_counter() - started_s
