"""What the engine can be asked about itself: the one file that knows the names of its counters."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.accounting import GroupFootprint


@dataclass(frozen=True)
class Counters:
    """Collectives of one rank and the bytes it sent in them.

    Attributes:
        gathers: Parameter all-gathers.
        reductions: Gradient reductions.
        gather_bytes: Bytes sent in gathers.
        reduce_bytes: Bytes sent in reductions.
    """

    gathers: int
    reductions: int
    gather_bytes: int
    reduce_bytes: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        """Return what came in between."""
        return Counters(
            self.gathers - earlier.gathers,
            self.reductions - earlier.reductions,
            self.gather_bytes - earlier.gather_bytes,
            self.reduce_bytes - earlier.reduce_bytes,
        )


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that the engine holds on one rank.

    Attributes:
        persistent_bytes: Weights and gradients, held all the time.
        transient_peak_bytes: The most that was gathered or in reduction at one time.
    """

    persistent_bytes: int
    transient_peak_bytes: int


def read_counters(model: MegatronFSDP) -> Counters:
    """Return the engine's counters since it was built."""
    traffic = model.traffic()
    return Counters(traffic.gathers, traffic.reductions, traffic.gather_bytes, traffic.reduce_bytes)


def read_memory(model: MegatronFSDP) -> EngineMemory:
    """Return the engine's own live bytes, as measured from its storages."""
    memory = model.memory()
    return EngineMemory(memory.persistent_bytes, memory.transient_peak_bytes)


def read_footprints(model: MegatronFSDP) -> tuple[GroupFootprint, ...]:
    """Return what the formulas need to know of each parameter group."""
    return model.footprints()


def exchanges_pairwise(model: MegatronFSDP) -> bool:
    """Whether reductions need a second bucket to receive into, because the back end has no good reduce-scatter."""
    return any(group.plan.axis.exchanges_pairwise and group.grads_sharded for group in model.parameter_groups())


def peak_bytes(model: MegatronFSDP, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return this rank's peak so far: all allocations of an accelerator; on a CPU, what `describe_peak` says.

    The CPU allocator keeps no statistics, and the resident size of a process says more about malloc than about tensors.
    """
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    memory = read_memory(model)
    return memory.persistent_bytes + memory.transient_peak_bytes + optimizer_bytes(optimizer)


def describe_peak(device: torch.device) -> str:
    """Return what `peak_bytes` counts on this device."""
    if device.type == "cpu":
        return "weights, gradients, optimizer, communication; no activations"
    return "all allocations on the device"


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state on this rank, step counters (one number each) left out."""
    return sum(tensor.numel() * tensor.itemsize for tensor in _state_tensors(optimizer) if tensor.ndim > 0)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the local part of every tensor in the optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, DTensor):
                yield value.to_local()
            elif isinstance(value, Tensor):
                yield value
