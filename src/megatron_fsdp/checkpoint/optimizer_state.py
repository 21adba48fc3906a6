"""Optimizer state by the names of parameters, independent of their order, grouping and the number of ranks.

torch keys optimizer state by the position of parameters in the groups. In a checkpoint it is stored under names:
`optimizer.state.<parameter>.<slot>`, and the options of the groups once, with the names of their parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.naming import (
    PREFIX,
    alike,
    is_repeated,
    listed_names,
    original_name,
    saved_name,
)
from megatron_fsdp.errors import ConfigurationError

GROUPS = "param_groups"
STATE = "state"
META = "param_to_group_meta"
KIND = "class"


def named_parameters_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the checkpoint names of the parameters of each group, in order, without a prefix."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = []
    for position, group in enumerate(optimizer.param_groups):
        unknown = [index for index, param in enumerate(group["params"]) if id(param) not in names]
        if unknown:
            raise ConfigurationError(
                f"parameter {unknown[0]} of param_groups[{position}] is not a parameter of the model, so its state has "
                "no name in a checkpoint; give the model that the optimizer was built on"
            )
        found.append([original_name(model, saved_name(model, names[id(param)])) for param in group["params"]])
    return found


def collect(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Collect the optimizer's section of a checkpoint; tensors are the live ones."""
    own = named_parameters_of(optimizer, model)
    names = listed_names(optimizer, model, own)
    _require_no_local_parts(optimizer)
    by_index = optimizer.state_dict()  # with the hooks that describe the chunks of its tensors
    flat = list(itertools.chain.from_iterable(names))
    params = (param for group in optimizer.param_groups for param in group["params"])
    blank = {name for name, param in zip(itertools.chain(*own), params, strict=True) if not optimizer.state.get(param)}
    named = (saved_name(model, name) for name, _ in model.named_parameters())
    repeated = {original_name(model, name) for name in named if is_repeated(model, name)}
    state = {
        PREFIX + flat[index]: slots
        for index, slots in by_index[STATE].items()
        if slots and isinstance(index, int) and flat[index] not in repeated | blank
    }
    options = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [PREFIX + name for name in names[position] if name not in repeated],
        }
        for position, group in enumerate(by_index[GROUPS])
    ]
    rest = {key: value for key, value in by_index.items() if key not in (STATE, GROUPS)}
    return {STATE: state, GROUPS: options, KIND: kind_of(optimizer), **rest}


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of the optimizer, or of the one that it wraps."""
    return type(getattr(optimizer, "inner_optimizer", optimizer)).__name__


def _require_no_local_parts(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that is this rank's shard as a plain tensor: one rank's would be saved for all."""
    for param, slots in optimizer.state.items():
        if not isinstance(param, DTensor) or param._local_tensor.shape == param.shape:
            continue
        for slot, value in slots.items():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_plain and value.dim() and value.shape == param._local_tensor.shape:
                raise ConfigurationError(
                    f"state {slot!r} of a parameter of shape {tuple(param.shape)} is a plain tensor of this rank's "
                    f"part, {tuple(value.shape)}, which a checkpoint cannot tell from that of other ranks; keep it as "
                    "the parameter is, as torch.zeros_like(param) makes it"
                )


def blank_slot(param: torch.Tensor, slot: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialised state tensor, cut as its parameter where it has that shape; "step" is never sharded."""
    if isinstance(param, DTensor) and slot != "step" and tuple(shape) == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    device = torch.device("cpu") if slot == "step" else param.device
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def options_by_name(groups: object) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter's group by its name, from what `collect` stored."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups if isinstance(groups, list) else [None]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ConfigurationError("the stored param_groups are not a list of dicts with the names of parameters")
        options = {key: value for key, value in group.items() if key != "params"}
        found.update({str(name): options for name in group["params"]})
    return found


def merged_options(
    names: Sequence[Sequence[str]], live: Sequence[Mapping[str, Any]], stored: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the options that each live group takes over."""
    merged = []
    for position, (params, group) in enumerate(zip(names, live, strict=True)):
        wanted: dict[str, Any] = {}
        for key in group.keys() - {"params"}:
            found = [(name, stored[name][key]) for name in params if name in stored and key in stored[name]]
            if not found:
                continue
            first, value = found[0]
            other = next((name for name, found_value in found if not alike(found_value, value)), None)
            if other is not None:
                raise ConfigurationError(
                    f"param_groups[{position}] holds {first} and {other}, which had different {key} when they were "
                    f"saved ({value!r} and {stored[other][key]!r}); group parameters as they were then"
                )
            wanted[key] = tuple(value) if isinstance(group[key], tuple) and isinstance(value, list) else value
        merged.append(wanted)
    return merged


def install(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    state: Mapping[str, Mapping[str, Any]],
    kept: Collection[str],
    options: Sequence[Mapping[str, Any]],
    rest: Mapping[str, Any],
) -> None:
    """Load state and options into an optimizer by its own `load_state_dict`, with its hooks."""
    positions = {name: position for position, name in enumerate(itertools.chain.from_iterable(names))}
    groups = []
    for group, params, wanted in zip(optimizer.param_groups, names, options, strict=True):
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append({**own, **wanted, "params": [positions[name] for name in params]})
    by_index = {positions[name]: dict(slots) for name, slots in state.items()}
    for group, params in zip(optimizer.param_groups, names, strict=True):
        for param, name in zip(group["params"], params, strict=True):
            if name in kept and optimizer.state.get(param):
                by_index[positions[name]] = dict(optimizer.state[param])
    optimizer.load_state_dict({STATE: by_index, GROUPS: groups, **rest})


class _OptimizerByPosition:
    """Presents an optimizer's state under text keys, and makes tensors that a fresh one does not have yet."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        found = self._optimizer.state_dict()
        return {**found, STATE: {str(position): slots for position, slots in found[STATE].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        by_position = {int(position): slots for position, slots in state_dict.get(STATE, {}).items()}
        self._optimizer.load_state_dict({**state_dict, STATE: by_position})

    def blank(self, path: Sequence[str], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Make a tensor to load into, sharded as its parameter; None for what is no state of a parameter."""
        params = list(itertools.chain.from_iterable(group["params"] for group in self._optimizer.param_groups))
        if len(path) < 3 or path[0] != STATE or not path[1].isdecimal() or int(path[1]) >= len(params):
            return None
        return blank_slot(params[int(path[1])].detach(), path[-1], shape, dtype)


def as_extra(value: Any) -> Any:
    """Wrap an optimizer so that it can be an extra of a checkpoint; return other objects unchanged."""
    return _OptimizerByPosition(value) if isinstance(value, torch.optim.Optimizer) else value
