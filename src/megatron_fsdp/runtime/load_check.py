"""Find out what is wrong with a state dict before anything of it is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron_fsdp.buffer.exchange import gather_objects
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.operands import local_operand
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError


class _CopiesNothing(TorchFunctionMode):
    """Lets `tensor.copy_(other)` check that it could, and do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            if isinstance(args[0], UnevenDTensor):
                local_operand(args[0].shard_frame, args[1], "copy_")
            return args[0]
        return func(*args, **dict(kwargs or {}))


def check_load(module: nn.Module, load: Callable[[], object]) -> str | None:
    """Go through a load without copying; no communication.

    Args:
        module: Where it loads into.
        load: Does it, by torch's own means; it may be called again afterwards.

    Returns:
        What torch would complain of, all together; None where nothing is wrong.
    """
    overridden = [each for each in module.modules() if type(each).set_extra_state is not nn.Module.set_extra_state]
    before = [(each, each.get_extra_state()) for each in overridden]
    try:
        with _CopiesNothing():
            load()
    except RuntimeError as error:
        return str(error)
    finally:
        for each, state in before:
            each.set_extra_state(state)
    return None


# ---- shards of other ranks -------------------------------------------------------------------------------------------


def other_shards(value: object, frame: ShardFrame) -> str | None:
    """Say what is wrong with a shard that is cut otherwise than it should be; no communication.

    Args:
        value: Anything out of a state dict.
        frame: How it should be cut.

    Returns:
        One sentence, with this rank in it; None for what fits, is whole, or is no shard of ours.
    """
    if not isinstance(value, UnevenDTensor) or value.shape != frame.shape or value.shard_frame == frame:
        return None
    given, own = value.shard_frame.description, frame.description
    if given.is_whole:
        return None
    place = f"at {given.coordinate} on a mesh of shape {given.use.sizes}"
    is_own_place = (given.coordinate, given.use.sizes) == (own.coordinate, own.use.sizes)
    whose = "its own under another strategy or other units" if is_own_place else f"those of the rank {place}"
    return (
        f"rank {dist.get_rank()} was given shards that it does not hold ({whose}), and nothing was loaded: torch.save "
        "writes the shards of the rank that calls it and no whole tensors; save and load with "
        "torch.distributed.checkpoint, or with save_checkpoint and load_checkpoint of megatron_fsdp.checkpoint"
    )


def are_from_file(values: Iterable[object]) -> bool:
    """Whether there are shards that were unpickled, as from one file that all ranks read."""
    return any(
        isinstance(value, UnevenDTensor) and value.shard_frame.is_from_file and not value.shard_frame.is_whole
        for value in values
    )


def raise_everywhere(problem: str | None, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Let all ranks raise what any of them has found; one small collective for each group.

    Args:
        problem: What is wrong here.
        groups: Together they reach every rank; None for a single rank.

    Raises:
        CheckpointError: A rank has a problem; that of the first which has one.
    """
    for group in groups:
        if group is not None:
            problem = next((each for each in gather_objects(group, problem) if each is not None), None)
    if problem is not None:
        raise CheckpointError(problem)
