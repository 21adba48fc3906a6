"""Tell whether objects are the very ones of before, without keeping the tensors among them alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import call, is_
from typing import Any

import torch


class SameObjects:
    """Some objects in their order, to be compared by identity later.

    Args:
        things: Tensors are held weakly, so that their memory goes when nobody else wants it; all else is kept.
    """

    def __init__(self, things: Iterable[object]) -> None:
        self._gone: list[object] = []
        self._held = [*(_reference(thing, self._gone.append) for thing in things), lambda: _END]

    def are(self, things: Iterable[object]) -> bool:
        """Whether these are the same objects in the same order."""
        # One that is gone looks like None.
        return not self._gone and all(map(is_, chain(things, (_END,)), map(call, self._held)))


class SameState:
    """All that there is in the state of an optimizer, to be compared later.

    Args:
        source: The state: tensors under names, by parameter.
    """

    def __init__(self, source: Mapping[Any, Any]) -> None:
        states = _states_of(source)
        self._is_known = states is not None
        self._params = SameObjects(source)
        self._counts = list(map(len, states or ()))
        self._names = list(chain.from_iterable(states or ()))
        self._things = SameObjects(chain.from_iterable(map(_values, states or ())))

    def is_in(self, source: Mapping[Any, Any]) -> bool:
        """Whether there are the same objects under the same names for the same parameters, in the same order."""
        states = _states_of(source)
        return (
            self._is_known
            and states is not None
            and self._params.are(source)
            and self._things.are(chain.from_iterable(map(_values, states)))
            and list(map(len, states)) == self._counts
            and all(map(is_, chain.from_iterable(states), self._names))
        )


def _states_of(source: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """The state of each parameter; None where somebody keeps there what is none."""
    states = list(source.values())
    return states if set(map(type, states)) <= {dict} else None


def _reference(thing: object, note_gone: Callable[[object], None]) -> Callable[[], object]:
    return weakref.ref(thing, note_gone) if isinstance(thing, torch.Tensor) else lambda: thing


_END = object()
_values = dict.values
