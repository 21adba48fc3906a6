"""State dicts of optimizers with sharded parameters: their form when saved, and when loaded."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp.comm.agreement import Groups, Problem, ask
from megatron_fsdp.dtensor.shard_spec import no_write_items
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine, engine_of_param
from megatron_fsdp.errors import CheckpointError, warn_caller
from megatron_fsdp.optim.adamw8bit import AdamW8bit
from megatron_fsdp.optim.chained import ChainedOptimizer, members_of
from megatron_fsdp.optim.full_tensor.step import steps_owned
from megatron_fsdp.optim.local_step import params_of
from megatron_fsdp.state.experts import state_as_held, state_as_saved
from megatron_fsdp.state.state_dict import is_cut_by_torch, other_shards

StateDict = dict[str, Any]

STEP_KEY = "step"
"""Key of the step count: a scalar for each parameter, also where the parameter is a scalar itself."""
_BUFFER = "momentum_buffer"


def as_saved(engines: Iterable[Engine], optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Describe the chunks of state tensors, which the optimizer itself makes, when they are about to be saved."""
    alive = list(engines)
    for param, number in _numbered(optimizer, state_dict):
        group, index = engine_of_param(param).group_and_index[id(param)]
        for value in state_dict["state"].get(number, {}).values():
            if isinstance(value, DTensor) and value.shape == param.shape:
                group.describe_chunks(index, value)
    for engine in alive:
        names = engine.expert_names
        if not names.is_trivial:
            state_dict = state_as_saved(optimizer, state_dict, engine.sharded_names(), names)
    return state_dict


def _numbered(optimizer: Optimizer, state_dict: StateDict) -> list[tuple[Any, Any]]:
    """Pair each parameter with its number in a state dict."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return list(zip(params_of(optimizer), numbers, strict=True))


def as_held(
    engines: Iterable[Engine], lost: Lost, ranks: Callable[[], Groups], optimizer: Optimizer, state_dict: StateDict
) -> StateDict:
    """Return the state dict to load instead of a given one: this rank's shards, cut as its parameters.

    Shards that a rank does not hold are refused on all ranks that load, which are those of the groups that `ranks`
    returns. `lost` becomes the parameters whose state may have been left out.
    """
    lost.clear()
    alive = list(engines)
    held = _with_numbers(state_dict)
    for engine in alive:
        names = engine.expert_names
        if not names.is_trivial:
            held = state_as_held(optimizer, held, engine.sharded_names(), names)
    if len(params_of(optimizer)) != sum(len(group["params"]) for group in held["param_groups"]):
        return held  # torch refuses it, and the ranks that load are told
    if any(engine.weights_version for engine in alive):  # loaded, or trained
        _warn_of_lost_state(optimizer, held)
    lost.update(_frozen_without_state(optimizer, held))
    slots = [
        (number, value, param.shard_spec)
        for param, number in _numbered(optimizer, held)
        for value in held["state"].get(number, {}).values()
        if isinstance(param, UnevenDTensor)
    ]
    problem = next(filter(None, (other_shards(value, spec) for _, value, spec in slots)), None)
    cut = tuple(number for number, value, _ in slots if is_cut_by_torch(value))  # gathered one after another
    ask([(group, (problem, cut)) for group in ranks()], _problem_of_load)
    state = dict(held["state"])
    for param, number in _numbered(optimizer, held):
        if number in state and isinstance(param, DTensor):
            state[number] = {key: _cut_as(param, key, value) for key, value in state[number].items()}
    return _without_blank_momentum(optimizer, {**held, "state": state})


def _problem_of_load(reports: Sequence[tuple[str | None, tuple[Any, ...]]]) -> Problem | None:
    """Judge the state dicts that ranks load."""
    told = next((problem for problem, _ in reports if problem is not None), None)
    if told is None and len({cut for _, cut in reports}) > 1:
        told = "ranks were given optimizer state of which torch has cut other tensors; load the same on every rank"
    return None if told is None else (CheckpointError, told)


Lost = dict[torch.Tensor, str]
"""Parameters, with their names, that were frozen without state when state was loaded."""


def _frozen_without_state(optimizer: Optimizer, state_dict: StateDict) -> Lost:
    """Find frozen parameters without state in a state dict, which `dcp.load` could not fill."""
    engines = set(map(engine_of_param, params_of(optimizer)))
    names = {key: name for engine in engines for key, name in engine.sharded_names().items()}
    return {
        param: names[id(param)]
        for param, number in _numbered(optimizer, state_dict)
        if not (param.requires_grad or state_dict["state"].get(number))
    }


def warn_of_thawed(optimizer: Optimizer, lost: Lost) -> None:
    """Warn of parameters that are trained from now on, and had no state when that of others was loaded."""
    thawed = [param for param in lost if param.requires_grad]
    names = [lost.pop(param) for param in thawed if not optimizer.state.get(param)]
    if names and any(optimizer.state.values()):
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        warn_caller(
            f"{shown} had no state when the state of {type(optimizer).__name__} was loaded, since frozen parameters "
            "show none for torch.distributed.checkpoint.load to fill; thawed now, their moments start from zero. If "
            "the checkpoint has some, thaw before loading, or load with megatron_fsdp.checkpoint.load_checkpoint"
        )


_SHOWN = 8


def _warn_of_lost_state(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Warn where weights were loaded, and an optimizer without state is given none since it could not show any."""
    given = {param for param, number in _numbered(optimizer, state_dict) if state_dict["state"].get(number)}
    for each in members_of(optimizer):
        if not (each.state or is_known_without_a_step(each) or given.intersection(params_of(each))):
            kind = type(each).__name__
            warn_caller(
                f"{kind}.load_state_dict was given no state: the state of a {kind} is known after its first step only, "
                "so torch.distributed.checkpoint.load had none to fill, and moments start from zero; load with "
                "megatron_fsdp.checkpoint.load_checkpoint, which makes state out of what the checkpoint holds"
            )


def cut_state(optimizer: Optimizer) -> None:
    """Cut the state of an optimizer as its parameters are, in place, where a load has left it whole or cut evenly.

    Collective for state that is cut otherwise.
    """
    for param, state in optimizer.state.items():
        if isinstance(param, UnevenDTensor):
            state.update({key: _cut_as(param, key, value) for key, value in state.items()})


def _cut_as(param: DTensor, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or key == STEP_KEY:
        return value
    if isinstance(value, UnevenDTensor) and isinstance(param, UnevenDTensor) and value.shard_spec == param.shard_spec:
        is_same = value.shard_spec is param.shard_spec  # then no new wrapper, as for unpickled tensors
        return value if is_same else UnevenDTensor.wrap(value._local_tensor, param.shard_spec)
    if isinstance(value, DTensor) and not isinstance(param, UnevenDTensor):
        return value
    return engine_of_param(param).shard_like(param, value.full_tensor() if isinstance(value, DTensor) else value)


def _with_numbers(state_dict: StateDict) -> StateDict:
    """Merge the state that torch.distributed.checkpoint has loaded under "0" into that which it has filled under 0.

    It loads tensors in place, but puts other objects back under keys that it has turned into strings.
    """
    state = state_dict["state"]
    listed = {key for group in state_dict["param_groups"] for key in group["params"]}
    texts = {key: int(key) for key in state if isinstance(key, str) and key.isdecimal() and int(key) in listed}
    if not texts:
        return state_dict
    merged = {key: dict(values) for key, values in state.items() if key not in texts}
    for text, number in texts.items():
        merged.setdefault(number, {}).update(state[text])
    return {**state_dict, "state": merged}


# ---- state before the first step -------------------------------------------------------------------------------------
#
# torch's optimizers make the state of a parameter in their first step, so that a new one has none, and
# `torch.distributed.checkpoint.load`, which fills the tensors that it is given, would load none. Their initial state is
# made by a method of each class, `_init_group`, which is called here on an object of the class that shares everything
# with the optimizer but its parameters and its state. (SGD has only a buffer, which its step makes.)


def is_known_without_a_step(optimizer: Optimizer) -> bool:
    """Return True if the initial state of an optimizer can be made without a step: it is one of torch's, or ours."""
    kind = type(optimizer)
    if isinstance(optimizer, ChainedOptimizer):
        return all(map(is_known_without_a_step, optimizer.optimizers))
    if kind is AdamW8bit:
        return True
    of_torch = kind.step.__module__.startswith("torch.optim.") and hasattr(kind, "_init_group")
    return of_torch and not steps_owned(optimizer)  # which makes state from whole tensors


def with_blank_state(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Add the initial state of the first step, for every parameter that has none and is, or was once, trained.

    The optimizer is not changed: state that is loaded into these tensors becomes the optimizer's when `load_state_dict`
    is given them. The state is in the order of the parameters, the same on every rank; tensors are cut as parameters.
    """
    had, state = state_dict["state"], {}
    owners = (each for each in members_of(optimizer) for _ in each.param_groups)
    for owner, group, packed in zip(owners, optimizer.param_groups, state_dict["param_groups"], strict=True):
        is_known = is_known_without_a_step(owner) and not isinstance(owner, torch.optim.Adagrad)  # which has it at once
        for param, number in zip(group["params"], packed["params"], strict=True):
            makes = is_known and param.requires_grad
            if is_known and not makes:  # frozen after the model was sharded, it may have been trained before
                makes = engine_of_param(param).group_and_index[id(param)][0].gradients is not None
            found = had.get(number) or (_first_state(owner, group, param) if makes else None)
            if found:
                state[number] = found
    return {**state_dict, "state": {**state, **had}}


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.SGD):
        return {_BUFFER: torch.full_like(param.detach(), _blank_momentum(group))} if group["momentum"] else {}
    if isinstance(optimizer, AdamW8bit):
        return _saved_by_holders(param, optimizer.first_state(param))
    alias = param.detach()
    alias.grad = param.detach()  # its values are not read
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__ = {**optimizer.__dict__, "state": defaultdict(dict)}
    num_lists = len(inspect.signature(probe._init_group).parameters) - 1
    probe._init_group({**group, "params": [alias]}, *([] for _ in range(num_lists)))
    return _saved_by_holders(param, probe.state[alias])


def _saved_by_holders(param: torch.Tensor, made: dict[str, Any]) -> dict[str, Any]:
    if isinstance(param, DTensor) and param.numel() and not param._local_tensor.numel():
        for value in made.values():
            if not isinstance(value, DTensor):
                value.__create_write_items__ = no_write_items  # ranks that hold elements save the step count
    return made


# ---- SGD -------------------------------------------------------------------------------------------------------------


def _blank_momentum(group: Mapping[str, Any]) -> float:
    """Return the zero that means "no step yet": the sign that zero gradients do not leave in a buffer.

    Adding negative zero also changes no value, to the last bit.
    """
    return 0.0 if group["maximize"] and group["dampening"] else -0.0


def _without_blank_momentum(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Remove blank momentum where it differs from none: SGD's first step applies no dampening."""
    if not any(isinstance(each, torch.optim.SGD) for each in members_of(optimizer)):
        return state_dict
    blank = {
        number
        for group in state_dict["param_groups"]
        if group.get("dampening")
        for number in group["params"]
        if _is_blank(state_dict["state"].get(number, {}).get(_BUFFER), _blank_momentum(group))
    }
    state = {number: slots for number, slots in state_dict["state"].items() if number not in blank}
    return {**state_dict, "state": state}


def _is_blank(buffer: Any, zero: float) -> bool:
    if buffer is None:
        return False
    local: torch.Tensor = getattr(buffer, "_local_tensor", buffer)
    is_negative = torch.signbit(torch.tensor(zero)).item()
    return bool(local.numel() and not local.any() and (torch.signbit(local) == is_negative).all())
