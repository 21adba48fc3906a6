"""Utilities for client frameworks: the wrapper, ranks, mesh names, and tensor-parallel attributes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

from megatron_fsdp.dtensor.shard_spec import partition_dim
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, explains_arguments
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.mixed_precision import is_te_min_version as is_te_min_version
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex as FSDPDistributedIndex  # clients look for it here


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


def log_single_rank(logger_: logging.Logger, level: int, msg: str, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Call `logger_.log(level, msg, *args, **kwargs)` on one rank only."""
    if safe_get_rank() == rank:
        logger_.log(level, msg, *args, **kwargs)


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


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Return True if a mesh has all dimensions of these names, flattened ones included; False for None."""
    if device_mesh is None or submesh_names is None:
        return False
    names = (submesh_names,) if isinstance(submesh_names, str) else submesh_names
    return set(names) <= set(get_mesh_names(device_mesh))


@explains_arguments()
def is_submodule(
    module: nn.Module,
    parent_module: nn.Module | None = None,
    strict: bool = True,
    *,
    parent: nn.Module | None = None,
) -> bool:
    """Return True if a module lies inside another.

    Args:
        module: The inner one.
        parent_module: The outer one.
        strict: A module does not lie inside itself.
        parent: An earlier name of `parent_module`.
    """
    outer = parent if parent_module is None else parent_module
    if outer is None:
        raise TypeError("is_submodule() was called without 'parent_module'; give the outer module")
    return any(module is part for part in outer.modules() if not strict or part is not outer)


def get_te_version() -> None:
    """Return None: this package does not use TransformerEngine."""


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return True if torch is newer than a version, or that one where `check_equality`."""
    own, asked = TorchVersion(torch.__version__.partition("+")[0]), TorchVersion(version)
    return own >= asked if check_equality else own > asked


class RNGTracker:
    """Random states by name: tensor-parallel ranks draw alike in one and each for itself in another."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self.reset()

    def is_initialized(self) -> bool:
        """Return True once states were added or set."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the states by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace the states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state of a seed.

        Raises:
            ConfigurationError: The name is there already.
        """
        if name in self._states:
            raise ConfigurationError(f"the tracker has a state {name!r} already; give each its own name")
        self._states[name] = _random().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from a state inside this block; it goes on where the block ended.

        Raises:
            ConfigurationError: There is no such state.
        """
        if name not in self._states:
            raise ConfigurationError(f"the tracker has no state {name!r}; call add({name!r}, seed) first")
        device = torch.accelerator.current_accelerator(check_available=True)
        module: Any = torch.get_device_module(device) if device is not None else torch
        before = module.get_rng_state()
        module.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = module.get_rng_state()
            module.set_rng_state(before)


def _random() -> torch.Generator:
    return torch.Generator(torch.accelerator.current_accelerator(check_available=True) or "cpu")


_tracker: RNGTracker | None = None


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Make the process's tracker of random states, unless there is one and it need not be replaced (`force_reset`).

    Raises:
        NotSupportedYetError: One of the other kinds of tracker is asked for.
    """
    global _tracker
    if use_te_rng_tracker or inference_rng_tracker or use_cudagraphable_rng:
        raise NotSupportedYetError("only the plain tracker of random states is supported; leave the three flags False")
    if _tracker is None or force_reset:
        _tracker = RNGTracker()


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> RNGTracker:
    """Return the process's tracker of random states, of the accelerator or, without one, of the CPU."""
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    assert _tracker is not None
    return _tracker


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return True if a parameter is marked as split over tensor-parallel ranks (by flag or mode)."""
    has_mode = getattr(param, "_tensor_parallel_mode", None) in ("column", "row")
    return has_mode or bool(getattr(param, "tensor_model_parallel", False))


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Return True if every tensor-parallel rank holds the whole parameter."""
    return not is_mcore_tensor_model_parallel(param)


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """Return the dimension along which tensor-parallel ranks split a parameter, or None.

    `_tensor_parallel_mode` goes first ("column": 0, "row": 1), then `partition_dim` of a parameter that is marked with
    `tensor_model_parallel`; a negative one means none.
    """
    return partition_dim(param)
