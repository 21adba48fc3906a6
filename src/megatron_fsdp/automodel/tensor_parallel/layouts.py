"""Plain tensors between tensor-parallel ranks: sums, cuts and gathers with the right gradients, all by DTensor.

The modules of transformers compute with plain tensors. What a plain tensor means to the group ("every rank has the
same", "every rank has a part") is known where it enters or leaves a module that was divided, and stated here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

SEQUENCE_DIM = 1
"""The dimension of the tokens in activations of transformers, (batch, sequence, hidden)."""


def with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor; its gradient, of which each rank computes a part, is summed over the ranks.

    Args:
        tensor: Equal on all ranks, any shape.
        mesh: The tensor-parallel ranks.
    """
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks, on each of them; the gradient, equal on all ranks, is passed on as it is.

    Args:
        tensor: Each rank's part of the sum, any shape.
        mesh: The tensor-parallel ranks.
    """
    return (
        DTensor.from_local(tensor, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    )


def gather_tokens(tensor: Tensor, mesh: DeviceMesh, gradient: Placement) -> Tensor:
    """All tokens on each rank.

    Args:
        tensor: This rank's tokens, (batch, sequence / ranks, hidden).
        mesh: The tensor-parallel ranks.
        gradient: What each rank's gradient of the whole is: `Partial()`, a part of a sum, or `Replicate()`, the sum.

    Returns:
        (batch, sequence, hidden).
    """
    parts = DTensor.from_local(tensor, mesh, [Shard(SEQUENCE_DIM)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def own_tokens(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of a tensor that is equal on all ranks; backward gathers the gradient of all tokens.

    Args:
        tensor: (batch, sequence, hidden); the ranks divide the sequence.
        mesh: The tensor-parallel ranks.

    Returns:
        (batch, sequence / ranks, hidden).
    """
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local()


def not_a_view(tensor: Tensor) -> Tensor:
    """The same values and memory, but no view for autograd.

    The local tensor of a DTensor counts as a view, of which FSDP2 warns where it leaves a sharded module.
    """
    own: Tensor = _NotAView.apply(tensor)  # type: ignore[no-untyped-call] # torch gives it no hints
    return own


class _NotAView(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
