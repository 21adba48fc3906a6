"""Memory of a rank as the trainer reports it, put together from what engine, optimizer and allocator say."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.train.engines.trained import Trained


def exchanges_pairwise(model: MegatronFSDP) -> bool:
    """Whether reductions need a second bucket to receive into, because the back end has no good reduce-scatter."""
    return any(group.exchanges_inside for group in model.parameter_groups())


def peak_bytes(trained: Trained) -> int:
    """Return this rank's peak so far: all allocations of an accelerator; on a CPU, what `describe_peak` says.

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
    """Return what `peak_bytes` counts with this engine on this device."""
    if trained.device.type != "cpu":
        return "all allocations on the device"
    if trained.inside is None:
        return "shards of weights and gradients, optimizer; no communication, no activations"
    return "weights, gradients, optimizer, communication; no activations"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
