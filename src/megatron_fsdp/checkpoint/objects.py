"""Read what `torch.save` wrote, objects and tensors alike, without running code from the file."""

from __future__ import annotations

import io
import warnings
import zipfile
from types import SimpleNamespace
from typing import IO, Any

import torch

from megatron_fsdp.checkpoint.restricted_pickle import Names, plain_names, reading, unpickler_for
from megatron_fsdp.errors import CheckpointError


def load_object(stream: IO[bytes], where: str) -> Any:
    """Read one object; tensors in it come to the CPU.

    Containers, numbers, text, tensors, NumPy arrays and `argparse.Namespace` are read as they are. Objects of packages
    such as Megatron are kept as `Opaque`. Nothing is imported.

    Args:
        stream: Seekable, with the bytes of one `torch.save`.
        where: Names the file (and the entry) in messages.

    Raises:
        CheckpointError: It names a class or function off the list, is not of the zip format that torch writes since
            1.6, holds TorchScript, or is damaged.
    """
    reading(where, lambda: _check_archive(stream, where))
    module = SimpleNamespace(Unpickler=unpickler_for(object_names(), where), __name__="restricted")
    return reading(where, lambda: _quiet_load(stream, pickle_module=module, weights_only=False))


def load_tensor(stream: IO[bytes], where: str) -> torch.Tensor:
    """Read one tensor to the CPU.

    Raises:
        CheckpointError: It is something else, or damaged.
    """
    found = reading(where, lambda: _quiet_load(stream, weights_only=True))
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{where} holds a {type(found).__name__} where a tensor should be; the file is damaged")
    return found


def load_object_bytes(raw: bytes, where: str) -> Any:
    """As `load_object`, of bytes."""
    return load_object(io.BytesIO(raw), where)


def _quiet_load(stream: IO[bytes], **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged files; that they are is said by an error
        return torch.load(stream, map_location="cpu", **kwargs)


def _check_archive(stream: IO[bytes], where: str) -> None:
    """Only the zip format is read: the older one is a chain of bare pickles, and TorchScript carries code."""
    start = stream.tell()
    if not zipfile.is_zipfile(stream):
        raise CheckpointError(f"{where} is not an archive of torch.save (zip format); it is damaged, or something else")
    stream.seek(start)
    with zipfile.ZipFile(stream) as archive:
        names = archive.namelist()
    stream.seek(start)
    if any(name.rpartition("/")[2] == "constants.pkl" for name in names):
        raise CheckpointError(f"{where} holds TorchScript, which is code; a checkpoint does not need it: refused")


def object_names() -> Names:
    """What objects in checkpoints consist of."""
    from torch import _utils

    names = plain_names()
    for name in ("_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_parameter"):
        names["torch._utils", name] = getattr(_utils, name)
    return names | _numpy_names()


def _numpy_names() -> dict[tuple[str, str], Any]:
    """Arrays and numbers of NumPy, which random states of `numpy.random` consist of."""
    try:
        import numpy as np
        from numpy._core import multiarray
    except ImportError:
        return {}
    names: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[module, "_reconstruct"] = multiarray._reconstruct
        names[module, "scalar"] = multiarray.scalar
    return names
