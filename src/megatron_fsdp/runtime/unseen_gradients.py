"""Optimizers that all gradients pass by, so that their steps train nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.notices import warn_caller
from megatron_fsdp.unit.param_group import ParameterGroup


class UnseenGradients:
    """Warns once where a step updated nothing because all gradients wait for their reduction."""

    def __init__(self) -> None:
        self._warned = False

    def look_at(self, optimizer: torch.optim.Optimizer, places: Mapping[int, tuple[ParameterGroup, int]]) -> None:
        """An optimizer that is not connected has stepped.

        Args:
            optimizer: The optimizer.
            places: Group and index of each sharded parameter by id.
        """
        if self._warned:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        gradients = [places[id(param)][0].gradients for param in params if id(param) in places]
        waits = any(found is not None and (found.has_deferred or found.has_pending) for found in gradients)
        if waits and all(param.grad is None for param in params):
            self._warned = True
            warn_caller(
                f"{type(optimizer).__name__} stepped while all gradients of its parameters wait for their reduction "
                "(no_sync, or sync_model_each_microbatch=False), so nothing was updated; connect it with "
                "fully_shard_optimizer or DistributedOptimizer, or call finish_grad_sync first"
            )


class ReplacedParameters:
    """The parameters that sharding took out of a model; no gradient comes to them any more.

    Args:
        module: The model, before it is sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._by_id = {id(param): (weakref.ref(param), name) for name, param in module.named_parameters()}
        self._right: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that holds such parameters; one that holds none is not searched again.

        One that has a gradient is somebody's: of another module that shares it and was not sharded, say.

        Raises:
            ConfigurationError: It would train nothing.
        """
        if optimizer in self._right:
            return
        held = [(where, param) for where, param in held_parameters(optimizer) if self._name(param) is not None]
        if not held:
            self._right.add(optimizer)
        for where, param in held:
            if param.grad is None and param.requires_grad:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds {self._name(param)} in {where} as it was before the model was "
                    "sharded, where no gradient comes, so its steps train nothing; hand model and optimizer to "
                    "fully_shard together, or build the optimizer on model.parameters() after fully_shard_model"
                )

    def _name(self, param: torch.Tensor) -> str | None:
        reference, name = self._by_id.get(id(param), (None, ""))
        return name if reference is not None and reference() is param else None


def check_keeps_no_copies(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> None:
    """Refuse to replace the parameters of an optimizer that keeps them where nobody else can replace them.

    Args:
        optimizer: To check.
        known: Name of each parameter that is going to be replaced, by id.

    Raises:
        ConfigurationError: It does.
    """
    for where, param in held_parameters(optimizer):
        if where != _IN_GROUPS and id(param) in known:
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps {known[id(param)]} in {where}, where sharding cannot replace it, so "
                "its steps would train nothing; shard the model by fully_shard_model, build the optimizer on its "
                "parameters, and hand it to fully_shard_optimizer"
            )


def held_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the parameter groups of an optimizer, and in lists and the like that it keeps besides, with where."""
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
