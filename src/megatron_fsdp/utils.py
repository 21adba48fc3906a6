"""Small functions that client frameworks import: finding the wrapper, and reading tensor-parallel marks."""

from __future__ import annotations

import torch
from torch import nn

from megatron_fsdp.megatron_fsdp import MegatronFSDP

_MODE_DIMS = {"column": 0, "row": 1}


def find_megatron_fsdp(model: nn.Module | None) -> MegatronFSDP | None:
    """The sharded model inside a chain of wrappers (each with its inner model as `.module`), or None."""
    while isinstance(model, nn.Module):
        if isinstance(model, MegatronFSDP):
            return model
        model = getattr(model, "module", None)
    return None


def is_submodule(module: nn.Module, parent: nn.Module, strict: bool = True) -> bool:
    """Whether a module lies inside another.

    Args:
        module: Which one.
        parent: Inside of which.
        strict: A module does not lie inside itself.
    """
    return any(module is part for part in parent.modules() if not strict or part is not parent)


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Whether a parameter is marked as split over tensor-parallel ranks (`tensor_model_parallel`, or its mode)."""
    return _mode(param) in _MODE_DIMS or bool(getattr(param, "tensor_model_parallel", False))


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Whether every tensor-parallel rank holds the whole parameter."""
    return not is_mcore_tensor_model_parallel(param)


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """The dimension that a parameter is split along over tensor-parallel ranks; None where it is not split.

    `_tensor_parallel_mode` goes first ("column": 0, "row": 1), then `partition_dim` of a parameter that is marked with
    `tensor_model_parallel`; a negative one means none.
    """
    mode = _mode(param)
    if mode in _MODE_DIMS:
        return _MODE_DIMS[mode]
    dim = getattr(param, "partition_dim", -1)
    return int(dim) if getattr(param, "tensor_model_parallel", False) and dim >= 0 else None


def _mode(param: torch.Tensor) -> str | None:
    mode = getattr(param, "_tensor_parallel_mode", None)
    return str(mode) if mode is not None else None
