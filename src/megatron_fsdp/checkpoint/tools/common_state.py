"""What a checkpoint holds besides tensors: iteration, arguments, schedules; as plain data."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.safe_read import load_object, open_file
from megatron_fsdp.checkpoint.tools.kinds import COMMON_FILE, COMMON_KEY
from megatron_fsdp.errors import CheckpointError

_FLAT_NAMES = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")
_DEPTH = 12


def read_common(folder: CheckpointFolder) -> dict[str, Any]:
    """The common state: of torch_dist the dict that Megatron wrote, else the objects of the same names.

    Raises:
        CheckpointError: It is damaged, asks for code, or is no dict.
    """
    if COMMON_KEY in folder.objects:
        found = folder.read_object(COMMON_KEY)
        where = COMMON_KEY
        if isinstance(found, list) and len(found) == 1:  # Megatron wraps objects in a list
            found = found[0]
    elif (folder.path / COMMON_FILE).is_file():
        where = str(folder.path / COMMON_FILE)
        found = read_common_file(folder)
    else:
        return {name: folder.read_object(name) for name in _FLAT_NAMES if name in folder.objects}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} holds a {type(found).__name__} where the common state (a dict) should be")
    return {str(key): value for key, value in found.items()}


def read_common_file(folder: CheckpointFolder) -> Any:
    """What is in `common.pt`, as Megatron's generations G1 and G2 have it.

    Raises:
        CheckpointError: It is not there, damaged, or asks for code.
    """
    path = folder.path / COMMON_FILE
    try:
        with open_file(path) as stream:
            return load_object(stream.read(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def as_json(value: Any, depth: int = _DEPTH) -> Any:
    """Any object as JSON: numbers, text, lists and objects; what has no such form as a short description."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}, {dtype_name(value.dtype)}"
    if isinstance(value, torch.dtype):
        return str(value)
    if depth == 0:
        return f"({type(value).__name__})"
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(inner, depth - 1) for inner in value]
    shape = getattr(value, "shape", None)
    return f"array of shape {shape}" if shape else _short(value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def dtype_name(dtype: torch.dtype) -> str:
    """Without `torch.`."""
    return str(dtype).removeprefix("torch.")
