"""Tensors that a unit leaves in attributes of its modules instead of returning them, such as a loss of its own."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(nn.Module().__dict__) - {"_buffers"}
"""Attributes of every module, which hold no results."""


class SideOutputs:
    """Finds what the latest forward of one unit left behind with a graph.

    Looks at attributes and buffers of the unit's modules, and one level into lists, tuples and dicts. Elsewhere (a
    global list, an object of another class) nothing is found, and autograd refuses the overwritten weights.

    Args:
        module: The unit's module.
        others: Ids of the modules of other units, which look after themselves.
    """

    def __init__(self, module: nn.Module, others: Collection[int]) -> None:
        self._owners = tuple(weakref.ref(owner) for owner in _own_modules(module, others))  # hooks of theirs hold this
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
            for reference in self._owners
            if (owner := reference()) is not None
            for value in _tensors_of(owner.__dict__)
            if value.grad_fn is not None and value.grad_fn._sequence_nr() >= start
        ]


def _own_modules(module: nn.Module, others: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from _own_modules(child, others)


def _tensors_of(attributes: dict[str, Any]) -> Iterator[Tensor]:
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict) and name not in _OF_TORCH:
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, Tensor):
                    yield item
