"""What an operation on shards may be given besides, and the elements of it that this rank needs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.reduction import ReducedScalar, plain
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ShardOperationError


def local_operand(frame: ShardFrame, value: Any, func: Any, elementwise: bool = True) -> Any:
    """The elements of an operand that belong to this rank's shard of a tensor cut as `frame`; no communication.

    Args:
        frame: Of the tensor that is computed.
        value: Any argument; what is no tensor is handed back.
        func: The operation, for messages.
        elementwise: Whether a plain tensor of one number, spread, says the same at every element.

    Raises:
        ShardOperationError: The operand's elements lie elsewhere, or it does not say whether ranks agree on it.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, UnevenDTensor):
        if value.shard_frame is frame or value.shard_frame == frame:
            return value._local_tensor
        if not value.shard_frame.is_whole:
            raise ShardOperationError(_differently_cut(func, frame, value))
        return _part_of(frame, value._local_tensor)
    if isinstance(value, DTensor):
        if not all(placement.is_replicate() for placement in value.placements):
            raise ShardOperationError(_differently_cut(func, frame, value))
        if value.ndim and value.device_mesh != frame.mesh:
            raise ShardOperationError(_differently_cut(func, frame, value))
        return _part_of(frame, value._local_tensor)
    if isinstance(value, ReducedScalar):
        return plain(value).reshape(())
    return _part_of_plain(frame, value, func, elementwise)


def _part_of(frame: ShardFrame, full: torch.Tensor) -> torch.Tensor:
    return full if full.ndim == 0 else frame.take(full)


def _part_of_plain(frame: ShardFrame, value: torch.Tensor, func: Any, elementwise: bool) -> torch.Tensor:
    if value.ndim == 0:
        return value
    lengths = zip(value.shape, value.stride(), strict=True)
    spreads = elementwise or _in_backward()
    if spreads and value.numel() and all(length == 1 or stride == 0 for length, stride in lengths):
        one = value[(0,) * value.ndim]  # one number, spread: such are gradients of sums
        return one.expand(frame.description.local_shape) if frame.shape else one
    if _in_backward():
        return frame.take(value)
    raise ShardOperationError(
        f"{func} mixes a tensor of shape {tuple(frame.shape)} that is sharded over ranks with a plain tensor of shape "
        f"{tuple(value.shape)}, of which nothing says that it is the same on every rank; wrap it by "
        "DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim), or compute on to_local()"
        f"{frame.advice}"
    )


def _in_backward() -> bool:
    """Whether autograd is calling: its full-size tensors come from reductions, which are the same on every rank."""
    return bool(torch._C._current_graph_task_id() != -1)


def _differently_cut(func: Any, frame: ShardFrame, other: DTensor) -> str:
    return (
        f"{func} mixes tensors that are cut differently: shape {tuple(frame.shape)} with placements "
        f"{frame.placements}, and shape {tuple(other.shape)} with placements {other.placements}; bring both to whole "
        "tensors by full_tensor(), or the second to Replicate on the same mesh"
    )
