"""Tensors that a unit leaves in attributes of its modules instead of returning them, such as a loss of its own."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(nn.Module().__dict__)
"""Attributes of every module, which hold no results."""
_BUFFERS = "_buffers"
_PLAIN = frozenset({int, float, bool, str, type(None)})


class SideOutputs:
    """Finds what the latest forward of one unit left behind with a graph.

    Looks at attributes and buffers of the unit's modules, and one level into lists, tuples and dicts. Elsewhere (a
    global list, an object of another class) nothing is found, and autograd refuses the overwritten weights.

    Args:
        module: The unit's module.
        others: Ids of the modules of other units, which look after themselves.
    """

    def __init__(self, module: nn.Module, others: Collection[int]) -> None:
        self._owners = tuple(_Attributes(owner) for owner in _own_modules(module, others))
        self._starts: list[int] = []

    def begin(self) -> None:
        """A forward of the unit is about to run."""
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def end(self) -> list[Tensor]:
        """The forward has run or failed; the tensors with a graph that it computed and left in attributes."""
        if not self._starts:
            return []
        start = self._starts.pop()
        return [
            value
            for owner in self._owners
            for value in owner.tensors()
            if value.grad_fn is not None and value.grad_fn._sequence_nr() >= start
        ]


class _Attributes:
    """The attributes of one module, by names that are looked up again only where one has been added or taken away.

    This runs after every forward, and of some forty attributes of a module few are not torch's own.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)  # hooks of the owner hold this
        self._names: tuple[str, ...] = ()
        self._seen: tuple[int, str | None] = (-1, None)

    def tensors(self) -> list[Tensor]:
        """What is there now, one level deep."""
        owner = self._owner()
        if owner is None:
            return []
        held = owner.__dict__
        seen = len(held), next(reversed(held), None)  # what is added comes last
        if seen != self._seen:
            self._seen, self._names = seen, tuple(name for name in held if name not in _OF_TORCH)
        found: list[Tensor] = []
        for name in self._names:
            value = held.get(name)
            if type(value) not in _PLAIN:
                found += _tensors_of(value)
        if held[_BUFFERS]:
            found += _tensors_of(held[_BUFFERS])
        return found


def _own_modules(module: nn.Module, others: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from _own_modules(child, others)


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [item for item in value if isinstance(item, Tensor)]
