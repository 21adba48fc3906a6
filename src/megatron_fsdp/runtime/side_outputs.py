"""Tensors that a unit leaves in attributes of its modules instead of returning them, such as a loss of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(nn.Module().__dict__)
"""Attributes of every module, which hold no results."""
_BUFFERS = "_buffers"
_FLAG = "training"
_FLAG_TWICE = itemgetter(_FLAG, _FLAG)
"""What every module has; of two names or more, a getter gives a tuple."""
_Values = Callable[[dict[str, Any]], tuple[Any, ...]]
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
    """The attributes of one module, looked at again only where one was added, taken away or assigned.

    This runs after every forward, and of some forty attributes of a module few are not torch's own.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)  # hooks of the owner hold this
        self._number = -1  # of all attributes
        self._values: _Values = _FLAG_TWICE
        self._plain: tuple[Any, ...] | None = None  # what they were, where nothing among them can hold a tensor

    def tensors(self) -> Sequence[Tensor]:
        """What is there now, one level deep."""
        owner = self._owner()
        if owner is None:
            return ()
        held = owner.__dict__
        try:
            values = self._values(held)
        except KeyError:  # as many were taken away as were added
            self._number = -1
        if len(held) != self._number:
            self._number = len(held)
            self._values = itemgetter(_FLAG, _FLAG, *(name for name in held if name not in _OF_TORCH))
            values, self._plain = self._values(held), None
        buffers = held[_BUFFERS]
        if self._plain is not None and not buffers and all(map(is_, values, self._plain)):
            return ()
        self._plain = values if all(map(_is_plain, values)) else None
        return [tensor for value in (*values, buffers) for tensor in _tensors_of(value)]


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value))


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
