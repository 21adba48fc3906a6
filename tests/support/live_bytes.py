"""Bytes that are alive: what a block of code allocates at its peak, and what a process holds now."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.settling import steady


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator makes inside the block until it dies.

    Storages from before the block are not counted, but those that are resized in it are as far as they grow or shrink.
    Operators that run inside those of tensor subclasses are not seen.

    Attributes:
        peak_bytes: The most that was alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._before_bytes = 0

    @property
    def now_bytes(self) -> int:
        """Alive now."""
        storages = [reference() for reference in self._known.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None) - self._before_bytes

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            if _key(storage) not in self._known:
                self._before_bytes += storage.nbytes()
                self._follow(storage)
            resized = resize(storage, num_bytes)
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            return resized

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_key(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if _key(storage) not in inputs and _key(storage) not in self._known:
                self._follow(storage)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)

        def dies(_: object) -> None:
            del self._known[key]

        self._known[key] = weakref.ref(storage, dies)


def held_bytes(collect: bool = True) -> int:
    """Bytes of all storages that some tensor object of this process refers to; `collect`: garbage does not count."""
    if not collect:
        return _held_now()
    gc.collect()
    return steady(_held_now)


def _held_now() -> int:
    found = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]  # proxies lie to isinstance
    return sum({_key(storage): storage.nbytes() for storage in _storages(found)}.values())


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, DTensor):
            leaf = leaf._local_tensor
        is_plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided
        if is_plain and not leaf.is_meta:
            yield leaf.untyped_storage()


def _key(storage: torch.UntypedStorage) -> int:
    return storage._cdata
