"""Tell whether objects are the very ones of before, without keeping the tensors among them alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import call, is_
from typing import Any

import torch

from megatron_fsdp.unit.grad_slot import num_shown


class SameObjects:
    """Some objects in their order, to be compared by identity later.

    Args:
        things: Tensors are held weakly, so that their memory goes when nobody else wants it; all else is kept.
    """

    def __init__(self, things: Iterable[object]) -> None:
        held = list(things)
        self._held = list(map(_reference, held))
        self._num_there = num_shown(held)  # a tensor that is gone looks like None

    def are(self, things: list[Any]) -> bool:
        """Whether these are the same objects in the same order."""
        return (
            len(things) == len(self._held)
            and all(map(is_, things, map(call, self._held)))
            and num_shown(things) == self._num_there
        )


class SameState:
    """All that there is in the state of an optimizer, to be compared later.

    Args:
        source: The state: tensors under names, by parameter.
    """

    def __init__(self, source: Mapping[Any, Any]) -> None:
        states = _states_of(source)
        self._is_known = states is not None
        self._params = SameObjects(source)
        self._names = list(map(tuple, states or ()))
        self._things = SameObjects(chain.from_iterable(map(_values, states or ())))

    def is_in(self, source: Mapping[Any, Any]) -> bool:
        """Whether there are the same objects under the same names for the same parameters, in the same order."""
        states = _states_of(source)
        return (
            self._is_known
            and states is not None
            and self._things.are(list(chain.from_iterable(map(_values, states))))
            and self._params.are(list(source))
            and list(map(tuple, states)) == self._names
        )


def _states_of(source: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """The state of each parameter; None where somebody keeps there what is none."""
    states = list(source.values())
    return states if set(map(type, states)) <= {dict} else None


def _reference(thing: object) -> Callable[[], object]:
    return weakref.ref(thing) if isinstance(thing, torch.Tensor) else lambda: thing


_values = dict.values
