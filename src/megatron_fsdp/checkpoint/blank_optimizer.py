"""Somewhere to load an optimizer's state into: made from what a checkpoint says it holds, without a step.

`torch.distributed.checkpoint.load` fills the tensors that it is given, and a new optimizer has none: each makes its own
kinds of state in its first step. Which kinds, of what dtype, is known to the checkpoint; how they are cut, to the
parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from megatron_fsdp.checkpoint.optimizer_state import blank_slot
from megatron_fsdp.errors import CheckpointError

_STEP = "step"


class StateModel(Protocol):
    """What is needed of the wrapped model."""

    def sharded_names(self) -> dict[int, str]:
        """Canonical name of each sharded parameter by its id."""
        ...

    def checkpoint_view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is cut as a parameter, as checkpoints see it."""
        ...

    def optimizer_state_as_saved(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict as checkpoints have it."""
        ...


@dataclass(frozen=True)
class Slot:
    """One kind of state of one parameter, such as `exp_avg`.

    Attributes:
        shape: Of the global tensor; None for an object that is no tensor.
        dtype: Of the tensor.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


def slots_in(metadata: Metadata, prefix: str = "optimizer.state") -> dict[str, dict[str, Slot]]:
    """The state that a checkpoint holds, by parameter and then by kind.

    Args:
        metadata: Of the checkpoint.
        prefix: Of the keys, which are `<prefix>.<parameter>.<kind>`.
    """
    found: dict[str, dict[str, Slot]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        param, dot, kind = key.removeprefix(f"{prefix}.").rpartition(".")
        if not key.startswith(f"{prefix}.") or not dot:
            continue
        if isinstance(entry, TensorStorageMetadata):
            found.setdefault(param, {})[kind] = Slot(tuple(entry.size), entry.properties.dtype)
        elif isinstance(entry, BytesStorageMetadata):
            found.setdefault(param, {})[kind] = Slot(None, None)
    return found


def state_keys(model: StateModel, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The number under which `optimizer.state_dict()` keeps the state of each parameter, by canonical name."""
    names = model.sharded_names()
    counted = itertools.count()
    groups = [[(next(counted), names[id(param)]) for param in group["params"]] for group in optimizer.param_groups]
    flat = list(itertools.chain.from_iterable(groups))
    empty: dict[str, Any] = {
        "state": {number: {} for number, _ in flat},
        "param_groups": [{"params": [number for number, _ in group]} for group in groups],
    }
    numbers = model.optimizer_state_as_saved(optimizer, empty)["state"]
    return {name: str(number) for (_, name), number in zip(flat, numbers, strict=True)}


def prepare_optimizer_state(
    model: StateModel,
    optimizer: torch.optim.Optimizer,
    slots: Mapping[str, Mapping[str, Slot]],
    keys: Mapping[str, str] | None = None,
) -> list[str]:
    """Give an optimizer the kinds of state that a checkpoint holds, to be loaded into. No communication, no step.

    State that is there already stays. Tensors of the shape of their parameter are cut as it is, others are whole.

    Args:
        model: The wrapped model whose parameters the optimizer has.
        optimizer: Its `state` is filled with zeros.
        slots: As `slots_in` finds them.
        keys: What `slots` calls each parameter, by canonical name; None: the numbers of `optimizer.state_dict()`.

    Returns:
        Canonical names of parameters of which the checkpoint holds no state; theirs is left as it is.

    Raises:
        CheckpointError: State has neither the shape of its parameter nor that of a single number, nor is it an object.
            Nothing was made.
    """
    names = model.sharded_names()
    keys = state_keys(model, optimizer) if keys is None else keys
    params = [(param, names[id(param)]) for group in optimizer.param_groups for param in group["params"]]
    of_each = {name: slots.get(keys[name], {}) for _, name in params}
    shapes = {name: tuple(model.checkpoint_view(name, param.detach()).shape) for param, name in params}
    numbers = {_STEP} | {
        kind for name, found in of_each.items() if shapes[name] for kind, slot in found.items() if slot.shape == ()
    }
    for name, found in of_each.items():
        for kind, slot in found.items():
            if slot.shape not in (None, (), shapes[name]):
                raise CheckpointError(
                    f"the checkpoint's {kind} of {name} has shape {slot.shape}, and the parameter {shapes[name]}; "
                    "load the state of an optimizer of the same model"
                )
    for param, name in params:
        state = optimizer.state[param] if of_each[name] else {}
        for kind, slot in of_each[name].items():
            if kind not in state:
                state[kind] = _blank(param, kind, slot, is_number=kind in numbers)
    return [name for name, found in of_each.items() if not found]


def _blank(param: torch.Tensor, kind: str, slot: Slot, is_number: bool) -> Any:
    if slot.shape is None or slot.dtype is None:
        return None  # an object; it is put in place of this
    if is_number:
        return blank_slot(param, _STEP, (), slot.dtype).zero_()
    return blank_slot(param, kind, tuple(param.shape), slot.dtype).zero_()
