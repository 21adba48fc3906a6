"""Tensors that state dicts handed out: they share the memory of main weights, but not its version counters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class HandedOut:
    """Tells whether what state dicts gave away was written to, as a bare `dcp.load` does."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = []

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follow tensors from now on, by an alias that shares their version counter and outlives them."""
        self._seen += [(weakref.ref(tensor), tensor.detach(), tensor._version) for tensor in tensors]

    @property
    def is_written(self) -> bool:
        """Whether any was written to since `changed` was called last."""
        return any(alias._version != version for _, alias, version in self._seen)

    def changed(self) -> bool:
        """Whether any was written to since the last call; those that have died are asked once more and forgotten."""
        changed = self.is_written
        self._seen = [(origin, alias, alias._version) for origin, alias, _ in self._seen if origin() is not None]
        return changed
