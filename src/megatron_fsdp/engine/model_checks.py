"""Checks between steps: parameters replaced or added, steps before gradients are reduced, writes through state dicts.

Each would make training wrong without an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, warn_caller


class UnreducedGradients:
    """Warns, once, when an optimizer steps before any gradient of its parameters is reduced."""

    def __init__(self) -> None:
        self._warned = False

    def check(
        self, optimizer: torch.optim.Optimizer, group_and_index: Mapping[int, tuple[ParameterGroup, int]]
    ) -> None:
        """Warn when an unconnected optimizer steps before gradients are reduced."""
        if self._warned:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        gradients = [group_and_index[id(param)][0].gradients for param in params if id(param) in group_and_index]
        waits = any(found is not None and (found.has_deferred_sum or found.has_inner_sum) for found in gradients)
        if waits and all(param.grad is None for param in params):
            self._warned = True
            warn_caller(
                f"{type(optimizer).__name__} stepped while all gradients of its parameters wait for their reduction "
                "(no_sync, or sync_model_each_microbatch=False), so nothing was updated; connect it with "
                "fully_shard_optimizer or DistributedOptimizer, or call finish_grad_sync first"
            )


class ReplacedParameters:
    """The original parameters that sharding took out of a model; they get no gradient any more."""

    def __init__(self, module: nn.Module) -> None:
        self._by_id = {id(param): (weakref.ref(param), name) for name, param in module.named_parameters()}
        self._right: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that holds such parameters; one that holds none is not searched again.

        One with a gradient is in use elsewhere, by another module that shares it and was not sharded, say.

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
    """Refuse an optimizer that keeps parameters outside of its groups, where sharding cannot replace them.

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
    """Iterate over the tensors in an optimizer's groups and in its other lists, with where each one is."""
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


_CHILDREN = itemgetter("_modules")
_PARAMETERS = itemgetter("_parameters")


class StructureCheck:
    """Finds trainable parameters that joined the model after sharding: each rank would train its own.

    Modules around known ones (wrappers) and modules without trainable parameters may come and go.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self._compiled: list[tuple[str, nn.Module, object]] = []
        self._modules = tuple(module.named_modules())
        self._namespaces = tuple(part.__dict__ for _, part in self._modules)
        self._known_modules = {id(part) for _, part in self._modules}
        self._known_params = {
            id(param) for unit in units for group in unit.groups for param in (*group.sharded, *group.full)
        }
        self._known_modules.add(id(None))  # attributes without a child or parameter
        self._known_params.add(id(None))

    def note_compiled(self, label: str, unit_module: nn.Module) -> None:
        """Refuse from now on that a unit's module, which was compiled in place before, is compiled once more."""
        self._compiled.append((label, unit_module, unit_module._compiled_call_impl))

    def check(self) -> None:
        """Check every module once.

        Raises:
            ConfigurationError: Names the first module or parameter that is new, or the first unit compiled again.
        """
        for label, unit_module, call in self._compiled:
            if unit_module._compiled_call_impl is not call:
                raise ConfigurationError(
                    f"unit {label} was compiled before and after the model was sharded; compile it once, before"
                )
        if self._all_known(_CHILDREN, self._known_modules) and self._all_known(_PARAMETERS, self._known_params):
            return
        known_modules, known_params = self._known_modules, self._known_params
        for name, module in self._modules:
            for attribute, child in module._modules.items():
                if child is not None and id(child) not in known_modules:
                    self._check_new(f"{name}.{attribute}".lstrip("."), child)
            for attribute, param in module._parameters.items():
                if param is not None and id(param) not in known_params and param.requires_grad:
                    raise _refusal(f"{name}.{attribute}".lstrip("."), "a parameter")

    def _all_known(self, kind: Callable[[dict[str, Any]], dict[str, Any]], known: set[int]) -> bool:
        """Return whether all children, or parameters, of all modules are known; in one pass without Python code."""
        held = chain.from_iterable(map(dict.values, map(kind, self._namespaces)))
        return known.issuperset(map(id, held))

    def _check_new(self, name: str, module: nn.Module) -> None:
        for param in module.parameters():
            if param.requires_grad and id(param) not in self._known_params:
                raise _refusal(name, f"a {type(module).__name__} with trainable parameters")


def _refusal(name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} is {what} that was put there after the model was sharded, so every rank would train its own copy; "
        "change the model before fully_shard, or freeze what is added"
    )


class StateDictAliases:
    """Tracks whether the tensors that state dicts have returned were written to, as a bare `dcp.load` does.

    They share the memory of main weights, but not its version counters.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = []

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follow tensors from now on, by an alias that shares their version counter and outlives them."""
        self._seen += [(weakref.ref(tensor), tensor.detach(), tensor._version) for tensor in tensors]

    @property
    def is_written(self) -> bool:
        """Whether any was written to since `changed` was called last."""
        return any(alias._version != version for _, alias, version in self._seen)

    def changed(self) -> bool:
        """Return whether any was written to since the last call; dead tensors are checked once more and dropped."""
        changed = self.is_written
        self._seen = [(origin, alias, alias._version) for origin, alias, _ in self._seen if origin() is not None]
        return changed
