"""Two objects of checkpoints by value: where they differ first. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Set
from typing import Any

import torch

from megatron_fsdp.checkpoint.safe_read import Opaque, shortened

_SHOWN = 60


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """Where two objects differ first, in words; None where they are equal. Two NaN are equal.

    Args:
        a: As `safe_read.load_object` reads it.
        b: As a.
        path: Of both inside their entry.
    """
    if isinstance(a, Opaque) and isinstance(b, Opaque):
        told_a, told_b = (
            {"class": x.qualified_name, "arguments": x.arguments, "state": x.state, "items": x.items} for x in (a, b)
        )
        return first_difference(told_a, told_b, path)
    if isinstance(a, argparse.Namespace) and isinstance(b, argparse.Namespace):
        return first_difference(vars(a), vars(b), path)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _of_mappings(a, b, path)
    if type(a) is not type(b):
        return _told(path, a, b)
    if isinstance(a, list | tuple):
        return _of_sequences(a, b, path)
    if isinstance(a, torch.Tensor):
        return None if _equal_tensors(a, b) else _told(path, a, b)
    if hasattr(a, "tobytes"):  # NumPy
        equal = (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
        return None if equal or _is_nan(a, b) else _told(path, a, b)
    if isinstance(a, Set):
        return None if a == b else _told(path, a, b)
    return None if a == b or _is_nan(a, b) else _told(path, a, b)


def _of_mappings(a: Mapping[Any, Any], b: Mapping[Any, Any], path: str) -> str | None:
    for key in sorted({*a, *b}, key=str):
        inner = shortened(f"{path}.{key}" if path else str(key))
        if key not in a or key not in b:
            return f"{inner} is only in {'B' if key not in a else 'A'}"
        found = first_difference(a[key], b[key], inner)
        if found is not None:
            return found
    return None


def _of_sequences(a: Any, b: Any, path: str) -> str | None:
    if len(a) != len(b):
        return f"{path or 'it'} has {len(a)} elements in A and {len(b)} in B"
    for place, (left, right) in enumerate(zip(a, b, strict=True)):
        found = first_difference(left, right, shortened(f"{path}[{place}]"))
        if found is not None:
            return found
    return None


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    return not a.numel() or torch.equal(*same)


def _is_nan(a: Any, b: Any) -> bool:
    return isinstance(a, float) and a != a and b != b  # that is what NaN is


def _told(path: str, a: Any, b: Any) -> str:
    left, right = _short(a), _short(b)
    if left == right:
        left, right = f"{left} ({type(a).__name__})", f"{right} ({type(b).__name__}), with other values"
    return f"{path + ': ' if path else ''}{left} in A, {right} in B"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
