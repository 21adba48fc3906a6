"""Operations on lists of tensors, which optimizers and clipping use: each tensor on its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.operands import local_operand
from megatron_fsdp.dtensor.reduction import plain
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ShardOperationError

Frames = list[ShardFrame | None]


def elementwise_on_lists(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a `_foreach_*` or `_fused_*` operation on the local tensors of its lists.

    Raises:
        ShardOperationError: Tensors at one place of the lists are cut differently.
    """
    frames: Frames | None = None
    for arg in args:
        if isinstance(arg, list | tuple) and any(isinstance(each, UnevenDTensor) for each in arg):
            frames = [each.shard_frame if isinstance(each, UnevenDTensor) else None for each in arg]
            break
    if frames is None:
        raise ShardOperationError(f"{func} mixes a list of plain tensors with a sharded tensor; give one sort")
    inner = [_local_argument(func, arg, frames) for arg in args]
    result = func(*inner, **{key: _local_argument(func, arg, frames) for key, arg in kwargs.items()})
    return _wrap(result, frames)


def _local_argument(func: Any, arg: Any, frames: Frames) -> Any:
    if isinstance(arg, list | tuple):
        return [_local_element(func, each, frames, index) for index, each in enumerate(arg)]
    if isinstance(arg, UnevenDTensor):
        if not arg.shard_frame.is_whole:
            raise ShardOperationError(f"{func}: a single tensor beside lists must not be sharded over ranks")
        return arg._local_tensor
    return plain(arg)


def _local_element(func: Any, each: Any, frames: Frames, index: int) -> Any:
    if type(each) is UnevenDTensor:
        frame = frames[index]
        if each.shard_frame is frame:
            return each._local_tensor
    if not isinstance(each, torch.Tensor) or (each.ndim == 0 and not isinstance(each, UnevenDTensor)):
        return plain(each)
    frame = frames[index] if index < len(frames) else None
    if frame is None:
        if isinstance(each, UnevenDTensor):
            raise ShardOperationError(f"{func} mixes plain and sharded tensors at place {index} of its lists")
        return each
    return local_operand(frame, each, func)


def _wrap(result: Any, frames: Frames) -> Any:
    if not isinstance(result, list | tuple):
        return result
    if result and isinstance(result[0], list | tuple):
        return type(result)(_wrap(each, frames) for each in result)
    return type(result)(
        each if frame is None else UnevenDTensor.wrap(each, frame) for each, frame in zip(result, frames, strict=True)
    )


def unscale(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`GradScaler`'s check and unscaling: all ranks that share a tensor learn whether any of them found infinity."""
    grads, found_inf, *rest = args
    func(
        [each._local_tensor if isinstance(each, UnevenDTensor) else each for each in grads], found_inf, *rest, **kwargs
    )
    groups = {
        group.group_name: group
        for each in grads
        if isinstance(each, UnevenDTensor)
        for group in each.shard_frame.groups
    }
    for name in sorted(groups):
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=groups[name])
