"""What a conversion plan is made of: tensors of the source, moves, and values. Pure data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PathParts = tuple[str | int, ...]
"""Where a value stands in the nested dict that a loader asks for; DCP joins it with dots to a key."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the source, in its true shape (which old files do not store; see `legacy.py`)."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a source tensor that becomes a whole tensor of the output: a view, no arithmetic.

    Attributes:
        source: Key in the source.
        offsets: First index per axis of the source's true shape.
        lengths: Indices per axis; leading axes of length one are those that vanish.
        target: Key in the output.
        path: The same as nested steps.
        shape: In the output; as many elements as the box.
        dtype: Of both.
    """

    source: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: str
    path: PathParts
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Value:
    """Something small that is written as it is: an object, or a tensor without a source box.

    Attributes:
        target: Key in the output.
        path: The same as nested steps.
        value: An object for `torch.save`, or a tensor.
    """

    target: str
    path: PathParts
    value: Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key of the source that is not in the output, and why."""

    key: str
    why: str


def key_of(path: PathParts) -> str:
    """The flat key of nested steps, as DCP makes it."""
    return ".".join(map(str, path))


def listed(keys: Sequence[str], shown: int = 8) -> str:
    """Keys for a message: the first few, and how many more."""
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return ", ".join(keys[:shown]) + more


def flatten(tree: Mapping[str, Any]) -> Iterator[Value]:
    """The leaves of a nested dict, as DCP flattens one: lists are walked only where they hold dicts or tensors."""
    for path, value in _leaves((), tree):
        yield Value(key_of(path), path, value)


def _leaves(path: PathParts, value: Any) -> Iterator[tuple[PathParts, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    elif isinstance(value, list) and any(_is_walked(inner) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves((*path, index), inner)
    else:
        yield path, value


def _is_walked(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_walked(inner) for inner in value)
    return isinstance(value, Mapping | torch.Tensor)
