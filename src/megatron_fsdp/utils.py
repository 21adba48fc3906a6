"""Utilities for client frameworks: the wrapper, ranks, mesh names, and tensor-parallel attributes."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex as FSDPDistributedIndex  # clients look for it here

_MODE_DIMS = {"column": 0, "row": 1}


def find_megatron_fsdp(model: nn.Module | None) -> MegatronFSDP | None:
    """Return the sharded model inside a chain of wrappers (each with its inner model as `.module`), or None."""
    while isinstance(model, nn.Module):
        if isinstance(model, MegatronFSDP):
            return model
        model = getattr(model, "module", None)
    return None


def safe_get_rank() -> int:
    """Return this process's rank: in the default group, else from `RANK` of the environment, else 0.

    Raises:
        ConfigurationError: `RANK` is not a whole number.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    given = os.environ.get("RANK", "0")
    if not given.isdecimal():
        raise ConfigurationError(f"the environment has RANK={given!r}; give the number of this process, or unset it")
    return int(given)


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Call `logger.log` on one rank only.

    Args:
        logger: The logger.
        args: As for `logging.Logger.log`: the level, the message and its arguments.
        rank: The rank.
        kwargs: As for `logging.Logger.log`.
    """
    if safe_get_rank() == rank:
        logger.log(*args, **kwargs)


def using_tensor_parallel(dist_index: FSDPDistributedIndex, is_expert_parallel: bool = False) -> bool:
    """Return True if a tensor-parallel dimension, of dense parameters or experts, has more than one rank."""
    if dist_index.tp_dim is None or dist_index.get_root_mesh(is_expert_parallel) is None:
        return False
    return dist_index.get_submesh((dist_index.tp_dim,), is_expert_parallel).size() > 1


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """Return the names of a mesh's dimensions, and of those flattened from its root mesh.

    Args:
        device_mesh: The mesh; None: no names.
        only_submesh_dims: Leave the flattened ones out.
    """
    if device_mesh is None:
        return []
    flattened = () if only_submesh_dims else device_mesh._get_root_mesh()._flatten_mapping
    return [*(device_mesh.mesh_dim_names or ()), *flattened]


def is_submodule(module: nn.Module, parent: nn.Module, strict: bool = True) -> bool:
    """Return True if a module lies inside another.

    Args:
        module: The inner one.
        parent: The outer one.
        strict: A module does not lie inside itself.
    """
    return any(module is part for part in parent.modules() if not strict or part is not parent)


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return True if a parameter is marked as split over tensor-parallel ranks (by flag or mode)."""
    return _mode(param) in _MODE_DIMS or bool(getattr(param, "tensor_model_parallel", False))


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Return True if every tensor-parallel rank holds the whole parameter."""
    return not is_mcore_tensor_model_parallel(param)


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """Return the dimension along which tensor-parallel ranks split a parameter, or None.

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
