"""Hooks on a model's state dicts: they save sharded parameters, with chunk functions and names over all ranks."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.comm.agreement import all_agree, ask, first_problem
from megatron_fsdp.dtensor.dispatch import local_operand
from megatron_fsdp.dtensor.expert_names import described
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine, alive
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import CheckpointError, ConfigurationError


class _CopiesNothing(TorchFunctionMode):
    """A mode in which `tensor.copy_(other)` only checks that it could copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            if isinstance(args[0], UnevenDTensor):
                local_operand(args[0].shard_spec, args[1], "copy_")
            return args[0]
        return func(*args, **dict(kwargs or {}))


def check_load(module: nn.Module, load: Callable[[], object]) -> str | None:
    """Run a load without copying, and return torch's error about all entries, or None; no communication."""
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


def other_shards(value: object, spec: ShardSpec) -> str | None:
    """Describe a shard of this rank that is cut otherwise than it should be, in one sentence; no communication.

    None for what fits, is whole, or is no shard of ours.
    """
    if not isinstance(value, UnevenDTensor) or value.shape != spec.shape or value.shard_spec == spec:
        return None
    given, own = value.shard_spec.description, spec.description
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


def convert_expert_names(engine: Engine, module: nn.Module) -> list[RemovableHandle]:
    """Name the experts of all ranks in state dicts of a model, and those of this rank when one is loaded."""
    return [
        module.register_state_dict_post_hook(partial(_rename, engine.expert_names.name_of)),
        # Other ranks' experts are left out, as the state dict may be of the whole model.
        module.register_load_state_dict_pre_hook(partial(_rename, engine.expert_names.name_here)),
    ]


# Hooks on the modules of a unit, and on those that hold its parameters. The unit's engine may not be made yet.


def describe_shards(
    reference: weakref.ref[Unit], owner: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """Attach chunk functions to the shards of a state dict, and to a rank's stacked experts those of all ranks."""
    unit = alive(reference)
    for attribute, param in owner._parameters.items():
        value = state_dict.get(prefix + attribute)
        if isinstance(value, DTensor) and id(param) in unit.group_and_index:
            group, index = unit.group_and_index[id(param)]
            if unit.engine is not None:
                value = unit.engine.expert_names.as_saved(group.names[index], value)
            state_dict[prefix + attribute] = described(value)


def before_state_dict(reference: weakref.ref[Unit], *_unused: Any) -> None:
    """Reshard a model of which a state dict is taken; refuse one in the middle of an iteration."""
    engine = alive(reference).engine
    if engine is not None:
        engine.refuse_open_iteration("a state dict was taken")
        if not engine.scheduler.in_forward and not engine.units_in_full_context:
            engine.to_sharded()


def before_load(
    reference: weakref.ref[Unit],
    owner: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_unused: Any,
) -> None:
    """Cut whole tensors, which have to be the same on every rank, to this rank's shards; refuse `assign=True`."""
    if metadata.get("assign_to_params_buffers", False):
        raise ConfigurationError(
            f"load_state_dict(assign=True) would replace the sharded parameters of {prefix or type(owner).__name__}, "
            "which are views of flat buffers; load with assign=False, which copies"
        )
    unit = alive(reference)
    if unit.engine is not None:
        unit.engine.refuse_open_iteration("a state dict was loaded")
    for attribute, param in owner._parameters.items():
        if prefix + attribute in state_dict and id(param) in unit.group_and_index:
            group, index = unit.group_and_index[id(param)]
            value = state_dict[prefix + attribute]
            if is_cut_by_torch(value):  # into even shards, as FSDP2's are
                value = value.full_tensor()
            if unit.engine is not None:
                value = unit.engine.expert_names.as_held(group.names[index], value)
            state_dict[prefix + attribute] = own_shard(value, group.shard_specs[index])


# ---- experts ---------------------------------------------------------------------------------------------------------


def _rename(
    new_name: Callable[[str], str | None],
    _module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_unused: Any,
) -> None:
    """Rename keys behind the prefix, in place; drop those without a new name."""
    entries = list(state_dict.items())
    state_dict.clear()
    for key, value in entries:
        if not key.startswith(prefix):
            state_dict[key] = value
        elif (name := new_name(key.removeprefix(prefix))) is not None:
            state_dict[prefix + name] = value


def own_shard(value: Any, spec: ShardSpec) -> Any:
    """Return this rank's shard of a whole tensor, as a view; anything else as it is."""
    if isinstance(value, DTensor) and not isinstance(value, UnevenDTensor):
        if not all(placement.is_replicate() for placement in value.placements):
            return value
        value = value._local_tensor
    if isinstance(value, UnevenDTensor) or not isinstance(value, torch.Tensor) or value.shape != spec.shape:
        return value
    return UnevenDTensor.wrap(spec.take(value.detach()), spec)


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_shards(
    engine: Engine,
    wrapper: nn.Module,
    load: Callable[..., Any],
    state_dict: Mapping[str, Any],
    strict: bool,
    assign: bool,
) -> Any:
    """Load a state dict whose names have `module.` in front, by torch's `load` of the wrapper, and install the weights.

    Raises:
        CheckpointError: Something does not fit; nothing was loaded.
        ConfigurationError: `assign` is True.
    """
    are_cut = any(map(_is_of_torch, state_dict.values()))
    engine.refuse_open_iteration("a state dict was loaded")
    with all_agree("load_state_dict", engine.reaching_all if are_cut else (None,)):
        if assign:
            raise ConfigurationError(
                "load_state_dict(assign=True) would replace the sharded parameters of the model, which are views "
                "of flat buffers; load with assign=False, which copies"
            )
    state_dict = _recut(engine, state_dict)
    problem = _problem_of_load(engine, wrapper, load, state_dict, strict)
    shards = [value.shard_spec for value in state_dict.values() if isinstance(value, UnevenDTensor)]
    # Shards that were unpickled are of one file, which all ranks read.
    groups = engine.reaching_all if any(spec.is_from_file and not spec.is_whole for spec in shards) else (None,)
    ask([(group, None if problem is None else (CheckpointError, problem)) for group in groups], first_problem)
    result = load(state_dict, strict)
    engine.install_main_weights()
    return result


def _is_of_torch(value: object) -> bool:
    return isinstance(value, DTensor) and not isinstance(value, UnevenDTensor)


def is_cut_by_torch(value: Any) -> bool:
    """Return True for a DTensor whose even shards are not those of a parameter here."""
    return _is_of_torch(value) and not all(placement.is_replicate() for placement in value.placements)


def _recut(engine: Engine, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Cut tensors that torch has cut into equal shards as the parameters are."""
    specs, recut = _specs(engine), {}
    for key, value in state_dict.items():
        name = engine.expert_names.name_here(key.removeprefix(_PREFIX))
        if is_cut_by_torch(value) and (name is None or name in specs):  # a buffer, for example, stays as it is
            whole = value.full_tensor()
            recut[key] = whole if name is None else _held(engine, name, whole, specs[name]).clone()
    if not recut:
        return state_dict
    found = OrderedDict({**state_dict, **recut})
    if hasattr(state_dict, "_metadata"):
        found._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return found


def _specs(engine: Engine) -> dict[str, ShardSpec]:
    return {name: spec for group in engine.groups() for name, spec in zip(group.names, group.shard_specs, strict=True)}


def _held(engine: Engine, name: str, tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, of a parameter or of a stack of all ranks' experts, as views."""
    found: torch.Tensor = own_shard(engine.expert_names.as_held(name, tensor), spec)
    return found


def _problem_of_load(
    engine: Engine, wrapper: nn.Module, load: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool
) -> str | None:
    """Describe the entries that do not fit, and the remedy; None if all fit."""
    specs = _specs(engine)
    keys = {engine.expert_names.name_of(name): name for name in specs}
    fit = [key for key in keys if _PREFIX + key in state_dict]
    bare = [key for key in keys if key in state_dict]
    if bare and not fit:
        return (
            f"the keys of the state dict lack the prefix {_PREFIX!r} (such as {bare[0]!r}), as those of an "
            "unsharded model do, and nothing was loaded; load it with model.module.load_state_dict(state_dict)"
        )
    for key in fit:
        held = engine.expert_names.as_held(keys[key], state_dict[_PREFIX + key])
        problem = other_shards(held, specs[keys[key]])
        if problem is not None:
            return problem
    problem = check_load(wrapper, lambda: load(state_dict, strict))
    if problem is None:
        return None
    may_leave_out = fit and check_load(wrapper, lambda: load(state_dict, strict=False)) is None
    advice = ", or pass strict=False to load what fits and leave out the rest" if may_leave_out else ""
    return (
        f"the state dict does not fit, and nothing was loaded: {problem}\n"
        f"load what state_dict() of the same model gave{advice}"
    )


_PREFIX = "module."
