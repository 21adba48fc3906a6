"""Tensors in archives of `torch.save`, rebuilt as views of the bytes that were read."""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.storage import _dtype_to_storage_type_map

from megatron_fsdp.checkpoint.archive import Archive
from megatron_fsdp.checkpoint.data_unpickler import Builders
from megatron_fsdp.checkpoint.reading_budget import MAX_DIMS, ReadingBudget
from megatron_fsdp.checkpoint.restricted_pickle import Names, RestrictedUnpickler
from megatron_fsdp.errors import CheckpointError

_SMALL = 1 << 20


@dataclass(frozen=True)
class StorageKind:
    """Stands for a class of storages, such as `torch.FloatStorage`."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Stored:
    """The elements of a storage, without a shape.

    Attributes:
        flat: One dimension.
        views: Counts the bytes that the tensors of an archive stand for: each may be a view of the same storage.
    """

    flat: torch.Tensor
    views: ReadingBudget


class ArchiveUnpickler(RestrictedUnpickler):
    """Reads the pickle of an archive, with the storages around it."""

    def __init__(self, archive: Archive, names: Names, builders: Builders, *, check: bool) -> None:
        super().__init__(io.BytesIO(archive.read("data.pkl")))
        self.names, self.where, self.builders = names, archive.where, builders
        self.archive, self.check = archive, check
        self._stored: dict[tuple[str, torch.dtype], Stored] = {}
        self._views = ReadingBudget(archive.nbytes + _SMALL)

    def persistent_load(self, pid: Any, /) -> Stored:
        """A storage, by what the pickle says of it.

        Raises:
            CheckpointError: It says anything else, or another length than the storage has.
        """
        where = self.archive.where
        is_known = isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], StorageKind)
        if not (is_known and type(pid[2]) is str):
            raise CheckpointError(f"{where} refers to something outside of itself that is no storage; refused")
        _, kind, key, _location, numel = pid
        name = f"data/{key}"
        record = self.archive.records.get(name)
        if record is not None and (type(numel) is not int or numel * kind.dtype.itemsize != record.length):
            raise CheckpointError(
                f"{where} is damaged: {name!a:.100} has {record.length} bytes, not {numel!s:.30} elements of "
                f"{kind.dtype}"
            )
        found = self._stored.get((key, kind.dtype))
        if found is None:
            raw = self.archive.read(name, check=self.check)
            flat = self._elements(raw, self.archive.start_of(name), kind.dtype)
            found = self._stored[key, kind.dtype] = Stored(flat, self._views)
        return found

    def _elements(self, raw: memoryview, start: int, dtype: torch.dtype) -> torch.Tensor:
        if not len(raw):
            return torch.empty(0, dtype=dtype)
        order = bytes(self.archive.read("byteorder")) if "byteorder" in self.archive.records else b"little"
        if order not in (b"little", b"big"):
            raise CheckpointError(f"{self.archive.where} is damaged: byte order {order!r:.50}")
        swapped = order.decode() != sys.byteorder
        if swapped or start % dtype.itemsize:
            raw = memoryview(bytearray(raw))
        flat = torch.frombuffer(raw, dtype=torch.uint8)
        if swapped:
            flat.untyped_storage().byteswap(dtype)
        return flat.view(dtype)


def tensor_names() -> dict[tuple[str, str], Any]:
    """What pickles of tensors name."""
    names: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor"): _rebuilt,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_as,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
        ("torch", "UntypedStorage"): StorageKind(torch.uint8),
    }
    for dtype, name in _dtype_to_storage_type_map().items():
        if not name.startswith("Q"):  # quantized tensors are more than their storage
            names["torch", name] = StorageKind(dtype)
    return names


def _rebuilt(
    stored: Any,
    start: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    bits: Any = None,
) -> torch.Tensor:
    """Stands for torch's function of this purpose, whose arguments these are."""
    _require(isinstance(stored, Stored), "no storage")
    _require(_are_lengths(size) and _are_lengths(stride) and _are_lengths((start,)), "lengths that are none")
    _require(len(size) == len(stride), "as many strides as lengths")
    numel, flat = math.prod(size), stored.flat
    last = start + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if numel else 0
    _require(last < flat.numel() or not numel, "elements beyond its storage")
    _require(numel <= max(flat.numel(), _SMALL), "far more elements than are stored")
    _require(not hooks, "hooks, which are code")
    stored.views.spend(numel * flat.element_size())
    made = flat.as_strided(size, stride, start if numel else 0)
    for name, view in (("conj", torch.conj), ("neg", torch._neg_view)):
        if isinstance(bits, Mapping) and bits.get(name) is True:
            made = view(made)
    return made.requires_grad_() if requires_grad is True and made.is_floating_point() else made


def _rebuilt_as(
    stored: Any,
    start: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    bits: Any = None,
) -> torch.Tensor:
    """The same for dtypes that have no class of storages."""
    _require(isinstance(stored, Stored) and isinstance(dtype, torch.dtype), "no storage")
    return _rebuilt(Stored(stored.flat.view(dtype), stored.views), start, size, stride, requires_grad, hooks, bits)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    _require(isinstance(data, torch.Tensor) and not hooks, "no data, or hooks")
    return torch.nn.Parameter(data.detach(), requires_grad is True and data.is_floating_point())


def _are_lengths(values: Sequence[Any]) -> bool:
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
        return False
    return all(type(n) is int and 0 <= n < 1 << 62 for n in values)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(f"a tensor with {what}")
