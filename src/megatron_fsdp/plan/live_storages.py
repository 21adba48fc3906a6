"""Bytes of the storages that are alive, counted as they are made and as they die."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    """The plain tensors among the arguments or results of an operator, also one list deep."""
    for value in values:
        if type(value) in _PLAIN:
            assert isinstance(value, Tensor)
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


class LiveStorages:
    """Follows storages until they die. Views share a storage; on the meta device storages have sizes, too.

    Attributes:
        now_bytes: Alive now.
    """

    def __init__(self) -> None:
        self.now_bytes = 0
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    def note(self, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """An operator has run: follow the storages of its results that are not those of its operands.

        Those of operands are from before, or they are followed already.
        """
        known = {tensor.untyped_storage()._cdata for tensor in operands}
        for tensor in results:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                self._measure(key, storage)
            elif key not in known:
                self._follow(key, storage)

    def _follow(self, key: int, storage: torch.UntypedStorage) -> None:
        def dies(_: object) -> None:
            del self._references[key]
            self.now_bytes -= self._sizes.pop(key)

        self._references[key] = weakref.ref(storage, dies)
        self._sizes[key] = storage.nbytes()
        self.now_bytes += self._sizes[key]

    def _measure(self, key: int, storage: torch.UntypedStorage) -> None:
        """It may have been resized."""
        size = storage.nbytes()
        self.now_bytes += size - self._sizes[key]
        self._sizes[key] = size
