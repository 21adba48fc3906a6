"""Checks of optimizers that hold parameters from before the sharding, whose steps would train nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_fsdp.errors import ConfigurationError

_REPLACED = "_fsdp_replaced"  # on a parameter that sharding has taken out of a module: its name


def mark_replaced(name: str, param: nn.Parameter) -> None:
    """Mark an original parameter that sharding took out of a module; it gets no gradient any more."""
    setattr(param, _REPLACED, name)


def replaced_name(param: torch.Tensor) -> str | None:
    """Return the name of a parameter that sharding took out of a module; None for any other."""
    name: str | None = getattr(param, _REPLACED, None)
    return name


class OptimizerCheck:
    """Check for optimizers that hold parameters from before the sharding, which would train nothing."""

    def __init__(self) -> None:
        self._right: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer holds such parameters. One with none is not searched again.

        One with a gradient is in use elsewhere, by another module that shares it and was not sharded, say.
        """
        if optimizer in self._right:
            return
        held = [(where, param) for where, param in held_parameters(optimizer) if replaced_name(param) is not None]
        if not held:
            self._right.add(optimizer)
        for where, param in held:
            if param.grad is None and param.requires_grad:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds {replaced_name(param)} in {where} as it was before the model "
                    "was sharded, where no gradient comes, so its steps train nothing; hand model and optimizer to "
                    "fully_shard together, or build the optimizer on model.parameters() after the model is sharded"
                )


def check_keeps_no_copies(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> None:
    """Raise if an optimizer keeps parameters outside of its groups, where sharding cannot replace them."""
    for where, param in held_parameters(optimizer):
        if where != _IN_GROUPS and id(param) in known:
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps {known[id(param)]} in {where}, where sharding cannot replace it, so "
                "its steps would train nothing; shard the model by fully_shard_model, build the optimizer on its "
                "parameters, and hand it to fully_shard_optimizer"
            )


def held_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors in an optimizer's groups and in its other lists, with the place of each."""
    lists = [group["params"] for group in optimizer.param_groups]
    yield from ((_IN_GROUPS, param) for params in lists for param in params)
    for name, value in vars(optimizer).items():
        if name not in _GROUPS_AND_STATE and not any(value is params for params in lists):
            yield from ((f"its attribute {name}", each) for each in _tensors_in(value))


_IN_GROUPS = "its param_groups"
_GROUPS_AND_STATE = ("param_groups", "state", "defaults")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if not isinstance(value, list | tuple | set | dict):
        return []
    leaves = [*tree_leaves(value), *(value if isinstance(value, dict | set) else ())]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
