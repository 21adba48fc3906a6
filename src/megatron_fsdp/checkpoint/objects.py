"""Read what `torch.save` wrote, objects and tensors alike, without running code from the file."""

from __future__ import annotations

import functools
import io
import mmap
from pathlib import Path
from typing import IO, Any

import torch

from megatron_fsdp.checkpoint.archive import Archive
from megatron_fsdp.checkpoint.data_unpickler import Builders
from megatron_fsdp.checkpoint.numpy_values import numpy_builders, numpy_names
from megatron_fsdp.checkpoint.reading_budget import open_file
from megatron_fsdp.checkpoint.restricted_pickle import Names, plain_names, reading
from megatron_fsdp.checkpoint.stored_tensors import ArchiveUnpickler, tensor_names
from megatron_fsdp.errors import CheckpointError


def load_object(stream: IO[bytes], where: str) -> Any:
    """Read one object; tensors in it come to the CPU.

    Containers, numbers, text, tensors, NumPy arrays and `argparse.Namespace` are read as they are. Objects of packages
    such as Megatron are kept as `Opaque`. Nothing is imported.

    Args:
        stream: With the bytes of one `torch.save`, from where it stands to its end.
        where: Names the file (and the entry) in messages.

    Raises:
        CheckpointError: It names a class or function off the list, is not of the zip format that torch writes since
            1.6, holds TorchScript, or is damaged.
    """
    return reading(where, lambda: _loaded(bytearray(stream.read()), where, object_names(), check=True))


def load_object_bytes(raw: bytes | bytearray, where: str) -> Any:
    """As `load_object`, of bytes."""
    return load_object(io.BytesIO(raw), where)


def load_object_file(path: Path) -> Any:
    """As `load_object`, of a file whose tensors stay on disk until they are looked at (a private memory map).

    Raises:
        CheckpointError: As of `load_object`, or the file cannot be opened.
    """
    where = str(path)
    try:
        with open_file(path) as file:
            mapped = reading(where, lambda: mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
    return reading(where, lambda: _loaded(mapped, where, object_names(), check=False))


def load_tensor(raw: bytearray, where: str, *, check: bool = False) -> torch.Tensor:
    """Read one tensor to the CPU; it is a view of the bytes where they allow it.

    Args:
        raw: Of one `torch.save`.
        where: Names the file (and the entry) in messages.
        check: Compare the elements with the CRC-32 in the file. Takes longer than reading them.

    Raises:
        CheckpointError: It is something else, or damaged.
    """
    found = reading(where, lambda: _loaded(raw, where, chunk_names(), check=check))
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{where} holds a {type(found).__name__} where a tensor should be; the file is damaged")
    if found.numel() * found.element_size() > found.untyped_storage().nbytes():
        raise CheckpointError(f"{where} holds a tensor with fewer elements than its shape {tuple(found.shape)} has")
    return found.detach()


def _loaded(raw: bytearray | mmap.mmap, where: str, names: Names, *, check: bool) -> Any:
    archive = Archive(raw, where)
    return ArchiveUnpickler(archive, names, _builders(), check=check).load()


@functools.cache
def chunk_names() -> Names:
    """What single tensors consist of."""
    return plain_names() | tensor_names()


@functools.cache
def _builders() -> Builders:
    return {**ArchiveUnpickler.builders, **numpy_builders()}


@functools.cache
def object_names() -> Names:
    """What objects in checkpoints consist of."""
    return plain_names() | tensor_names() | numpy_names()
