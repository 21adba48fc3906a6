"""Objects as what `torch.load(weights_only=True)` accepts. Pure."""

from __future__ import annotations

import argparse
import collections
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from megatron_fsdp.checkpoint.safe_read import Opaque, shortened

_AS_IT_IS = frozenset({type(None), bool, int, float, str, bytes, bytearray, torch.dtype, torch.device, torch.Size})


def plain(value: Any, key: str, notes: list[str]) -> Any:
    """Turn an object into one of plain containers, numbers, text and tensors.

    Args:
        value: As `safe_read.load_object` reads it.
        key: Names it in notes.
        notes: Takes a line for each thing that changes its type.

    Returns:
        The object, copied where something changed.
    """
    if type(value) in _AS_IT_IS or isinstance(value, torch.Tensor):  # NumPy's float64 is a float, and not the same
        return value
    if isinstance(value, Mapping):
        changed = {plain(k, key, notes): plain(inner, shortened(f"{key}.{k}"), notes) for k, inner in value.items()}
        if isinstance(value, collections.OrderedDict | collections.Counter):
            return type(value)(changed)
        return changed
    if isinstance(value, list | tuple | set):
        return type(value)([plain(inner, shortened(f"{key}.{place}"), notes) for place, inner in enumerate(value)])
    return _converted(value, key, notes)


def _converted(value: Any, key: str, notes: list[str]) -> Any:
    before = type(value).__name__
    if isinstance(value, argparse.Namespace):
        found: Any = plain(vars(value), key, notes)
    elif isinstance(value, frozenset):
        found = {plain(inner, key, notes) for inner in value}
    elif isinstance(value, complex):
        found = torch.tensor(value, dtype=torch.complex128)
    elif isinstance(value, pathlib.PurePath):
        found = str(value)
    elif type(value).__module__ == "numpy":
        found = _from_numpy(value)
    else:
        before = value.qualified_name if isinstance(value, Opaque) else before
        found = repr(value)
    notes.append(f"{key}: {before} became {type(found).__name__}")
    return found


def _from_numpy(value: Any) -> Any:
    """An array as a tensor, a number as a number; what torch has no dtype for as lists or text."""
    if not value.shape:
        return value.item()
    try:
        return torch.from_numpy(value.copy())
    except TypeError:
        return value.tolist()
