"""Optimizer state before the first step: somewhere for a checkpoint to be loaded into, made without a step.

torch's optimizers make the state of a parameter in their first step, so that a new one has none, and
`torch.distributed.checkpoint.load`, which fills the tensors that it is given, would load none. What they begin with is
made by a method of each class, `_init_group`, which is called here on an object of the class that shares everything
with the optimizer but its parameters and its state. (SGD has no more than a buffer, which its step makes.)
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp.dtensor.chunks import leave_to_others

StateDict = dict[str, Any]

_BUFFER = "momentum_buffer"


def is_known_without_a_step(optimizer: Optimizer) -> bool:
    """Tell whether the state that an optimizer begins with can be made without a step: the step is one of torch's."""
    kind = type(optimizer)
    return kind.step.__module__.startswith("torch.optim.") and hasattr(kind, "_init_group")


def with_blank_state(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Add the state that the first step would begin with, for every trainable parameter that has none.

    The optimizer is not changed: state that is loaded into these tensors is the optimizer's once `load_state_dict` is
    given them.

    Args:
        optimizer: Whose parameters are sharded.
        state_dict: As torch made it.

    Returns:
        A state dict with state in the order of the parameters, the same on every rank; tensors cut as parameters.
    """
    if not is_known_without_a_step(optimizer) or isinstance(optimizer, torch.optim.Adagrad):
        return state_dict  # Adagrad makes its state when it is built
    had, state = state_dict["state"], {}
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, number in zip(group["params"], packed["params"], strict=True):
            found = had.get(number) or (_first_state(optimizer, group, param) if param.requires_grad else None)
            if found:
                state[number] = found
    return {**state_dict, "state": {**state, **had}}


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.SGD):
        return {_BUFFER: torch.full_like(param.detach(), _blank_momentum(group))} if group["momentum"] else {}
    alias = param.detach()
    alias.grad = param.detach()  # its values are not read
    stand_in: Any = object.__new__(type(optimizer))
    stand_in.__dict__ = {**optimizer.__dict__, "state": defaultdict(dict)}
    num_lists = len(inspect.signature(stand_in._init_group).parameters) - 1
    stand_in._init_group({**group, "params": [alias]}, *([] for _ in range(num_lists)))
    made: dict[str, Any] = stand_in.state[alias]
    if isinstance(param, DTensor) and param.numel() and not param._local_tensor.numel():
        for value in made.values():
            if not isinstance(value, DTensor):
                leave_to_others(value)  # the step is told by ranks that hold elements, and so may have taken it
    return made


# ---- SGD -------------------------------------------------------------------------------------------------------------


def _blank_momentum(group: Mapping[str, Any]) -> float:
    """Return the zero that stands for "no step yet": one that gradients of zero do not leave behind.

    Negative zero is also what changes nothing, to the last bit, where it is added to.
    """
    return 0.0 if group["maximize"] and group["dampening"] else -0.0


def without_blank_momentum(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Leave out blank momentum where it is not the same as none: the first step of SGD knows no dampening."""
    if not isinstance(optimizer, torch.optim.SGD):
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
