"""What hangs in the module tree that was not there when the model was sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.unit.unit import Unit

_CHILDREN = itemgetter("_modules")
_PARAMETERS = itemgetter("_parameters")


class StructureCheck:
    """Finds trainable parameters that joined the model after sharding: each rank would train its own, unseen.

    Modules around known ones (wrappers) and modules without trainable parameters may come and go.

    Args:
        module: The sharded model, with its hooks.
        units: Its units.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        unit_modules = {unit.label: module.get_submodule(unit.name) for unit in units if unit.is_module}
        self._compiled = [
            (label, unit_module, unit_module._compiled_call_impl)
            for label, unit_module in unit_modules.items()
            if unit_module._compiled_call_impl is not None
        ]
        self._modules = tuple(module.named_modules())
        self._namespaces = tuple(part.__dict__ for _, part in self._modules)
        self._known_modules = {id(part) for _, part in self._modules}
        self._known_params = {
            id(param) for unit in units for group in unit.groups for param in (*group.sharded, *group.full)
        }
        self._known_modules.add(id(None))  # places without a child or parameter
        self._known_params.add(id(None))

    def check(self) -> None:
        """Look at every module once.

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
        """Whether all children, or parameters, of all modules are known; in one pass that runs no code of Python."""
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
