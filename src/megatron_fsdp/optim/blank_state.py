"""Optimizer state before the first step, for a checkpoint to be loaded into.

torch's optimizers make the state of a parameter in their first step, so that a new one has none, and
`torch.distributed.checkpoint.load`, which fills the tensors that it is given, would load none. Their initial state is
made by a method of each class, `_init_group`, which is called here on an object of the class that shares everything
with the optimizer but its parameters and its state. (SGD has only a buffer, which its step makes.)
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp.dtensor.frame import exclude_from_save
from megatron_fsdp.optim.adamw8bit import AdamW8bit
from megatron_fsdp.optim.chained import ChainedOptimizer, members_of
from megatron_fsdp.optim.whole_step import steps_owned

StateDict = dict[str, Any]

_BUFFER = "momentum_buffer"


def is_known_without_a_step(optimizer: Optimizer) -> bool:
    """Return whether the initial state of an optimizer can be made without a step: it is one of torch's, or ours."""
    kind = type(optimizer)
    if isinstance(optimizer, ChainedOptimizer):
        return all(map(is_known_without_a_step, optimizer.optimizers))
    if kind is AdamW8bit:
        return True
    of_torch = kind.step.__module__.startswith("torch.optim.") and hasattr(kind, "_init_group")
    return of_torch and not steps_owned(optimizer)  # which makes state from whole tensors


def with_blank_state(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Add the initial state of the first step, for every trainable parameter that has none.

    The optimizer is not changed: state that is loaded into these tensors becomes the optimizer's when `load_state_dict`
    is given them.

    Returns:
        A state dict with state in the order of the parameters, the same on every rank; tensors cut as parameters.
    """
    had, state = state_dict["state"], {}
    owners = (each for each in members_of(optimizer) for _ in each.param_groups)
    for owner, group, packed in zip(owners, optimizer.param_groups, state_dict["param_groups"], strict=True):
        is_known = is_known_without_a_step(owner) and not isinstance(owner, torch.optim.Adagrad)  # which has it at once
        for param, number in zip(group["params"], packed["params"], strict=True):
            makes = is_known and param.requires_grad
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
                exclude_from_save(value)  # ranks that hold elements save the step count
    return made


# ---- SGD -------------------------------------------------------------------------------------------------------------


def _blank_momentum(group: Mapping[str, Any]) -> float:
    """Return the zero that stands for "no step yet": the sign that zero gradients do not leave in a buffer.

    Adding negative zero also changes no value, to the last bit.
    """
    return 0.0 if group["maximize"] and group["dampening"] else -0.0


def without_blank_momentum(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
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
