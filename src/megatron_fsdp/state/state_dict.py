"""Hooks on a model's state dicts: they save sharded parameters, with chunk functions and names over all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.dtensor.dispatch import local_operand
from megatron_fsdp.dtensor.expert_names import described
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine, live_engine
from megatron_fsdp.errors import ConfigurationError


class _CopiesNothing(TorchFunctionMode):
    """A mode in which `tensor.copy_(other)` only checks that it could copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            if isinstance(args[0], UnevenDTensor):
                local_operand(args[0].shard_frame, args[1], "copy_")
            return args[0]
        return func(*args, **dict(kwargs or {}))


def check_load(module: nn.Module, load: Callable[[], object]) -> str | None:
    """Run a load without copying, and return all of torch's complaints, None for none; no communication."""
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
    """Describe in one sentence a shard that is cut otherwise than it should be, on this rank; no communication.

    None for what fits, is whole, or is no shard of ours.
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
    """Return whether there are shards that were unpickled, as from one file that all ranks read."""
    return any(
        isinstance(value, UnevenDTensor) and value.shard_frame.is_from_file and not value.shard_frame.is_whole
        for value in values
    )


def register_state_dict_hooks(engine: Engine, module: nn.Module) -> list[RemovableHandle]:
    """Save sharded parameters in state dicts of the model and of its parts, whatever the modules hold now.

    The hooks attach chunk functions to the shards, and convert names. Loads that replace parameters are refused. Of
    whole tensors each rank loads its own elements; they have to be the same on every rank. Experts are saved as all
    ranks together have them, and converted back when they are loaded: tensors that stack a rank's experts in every
    state dict, names that count them in state dicts of the model.
    """
    reference = weakref.ref(engine)
    owners = [owner for owner in module.modules() if owner._parameters]
    before_load = partial(_before_load, reference)
    module.register_state_dict_pre_hook(partial(_before_state_dict, reference))
    for owner in owners:
        owner.register_load_state_dict_pre_hook(before_load)
    describe = partial(_describe, reference)
    handles = [owner.register_state_dict_post_hook(describe) for owner in owners]
    if not engine.expert_names.is_trivial:
        handles.append(module.register_state_dict_post_hook(partial(_to_global_names, reference)))
        handles.append(module.register_load_state_dict_pre_hook(partial(_to_local_names, reference)))
    return handles


def _describe(
    reference: weakref.ref[Engine], owner: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    engine = live_engine(reference)
    for attribute, param in owner._parameters.items():
        value = state_dict.get(prefix + attribute)
        if isinstance(value, DTensor) and id(param) in engine.group_and_index:
            group, index = engine.group_and_index[id(param)]
            state_dict[prefix + attribute] = described(engine.expert_names.as_saved(group.names[index], value))


def _before_state_dict(reference: weakref.ref[Engine], *_unused: Any) -> None:
    engine = live_engine(reference)
    engine.refuse_open_pass("a state dict was taken")
    if not engine.scheduler.in_forward and not engine.full_units:
        engine.show_sharded()


def _before_load(
    reference: weakref.ref[Engine],
    owner: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_unused: Any,
) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise ConfigurationError(
            f"load_state_dict(assign=True) would replace the sharded parameters of {prefix or type(owner).__name__}, "
            "which are pieces of flat buffers; load with assign=False, which copies"
        )
    engine = live_engine(reference)
    engine.refuse_open_pass("a state dict was loaded")
    for attribute, param in owner._parameters.items():
        if prefix + attribute in state_dict and id(param) in engine.group_and_index:
            group, index = engine.group_and_index[id(param)]
            value = engine.expert_names.as_held(group.names[index], state_dict[prefix + attribute])
            state_dict[prefix + attribute] = own_shard(value, group.frames[index])


# ---- experts ---------------------------------------------------------------------------------------------------------


def _to_global_names(
    reference: weakref.ref[Engine], _module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    _rename(state_dict, prefix, live_engine(reference).expert_names.name_of)


def _to_local_names(
    reference: weakref.ref[Engine], _module: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: Any
) -> None:
    """Rename to this rank's names; other ranks' experts are left out, as the state dict may be of the whole model."""
    _rename(state_dict, prefix, live_engine(reference).expert_names.name_here)


def _rename(state_dict: dict[str, Any], prefix: str, new_name: Callable[[str], str | None]) -> None:
    """Rename what is behind the prefix, in place; drop what has no new name."""
    entries = list(state_dict.items())
    state_dict.clear()
    for key, value in entries:
        if not key.startswith(prefix):
            state_dict[key] = value
        elif (name := new_name(key.removeprefix(prefix))) is not None:
            state_dict[prefix + name] = value


def own_shard(value: Any, frame: ShardFrame) -> Any:
    """Return this rank's elements of a whole tensor, as a view; anything else as it is."""
    if isinstance(value, DTensor) and not isinstance(value, UnevenDTensor):
        if not all(placement.is_replicate() for placement in value.placements):
            return value
        value = value._local_tensor
    if isinstance(value, UnevenDTensor) or not isinstance(value, torch.Tensor) or value.shape != frame.shape:
        return value
    return UnevenDTensor.wrap(frame.take(value.detach()), frame)
