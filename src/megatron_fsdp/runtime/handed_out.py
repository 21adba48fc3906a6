"""Tensors that state dicts handed out: they share the memory of main weights, but not its version counters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class HandedOut:
    """Tells whether what state dicts gave away may have been written to, as a bare `dcp.load` does."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follow tensors from now on, weakly."""
        self._seen += [(weakref.ref(tensor), tensor._version) for tensor in tensors]

    def changed(self) -> bool:
        """Whether any was written to since the last call; a tensor that has died meanwhile may have been."""
        alive = [(reference(), version) for reference, version in self._seen]
        changed = any(tensor is None or tensor._version != version for tensor, version in alive)
        self._seen = [(weakref.ref(tensor), tensor._version) for tensor, _ in alive if tensor is not None]
        return changed
