"""The device meshes of the strategies: their axes, the order of these, and axes flattened from several."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.automodel.config import (
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    ParallelismSizes,
    ParallelSizes,
    check_config,
    resolve_sizes,
)
from megatron_fsdp.comm.groups import bound_device
from megatron_fsdp.errors import ConfigurationError, warn_caller

FSDP2_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MEGATRON_AXES = ("dp", "cp", "tp")
EXPERT_AXES = ("ep_shard", "ep")
"""Outermost first: ranks of the last axis are neighbours."""

_FLATTENED: Mapping[tuple[str, ...], Mapping[str, tuple[str, ...]]] = {
    FSDP2_AXES: {
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard", "cp"),
        "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    },
    MEGATRON_AXES: {"dp_cp": ("dp", "cp")},
}
"""Axes across several: "dp" to share out data, "dp_shard_cp" to shard parameters, "dp_cp" to average over."""


@dataclass(frozen=True)
class MeshContext:
    """The meshes of a model, their sizes and this rank's device.

    Attributes:
        sizes: Ranks on each axis.
        device_mesh: FSDP2: (pp, dp_replicate, dp_shard, cp, tp); MegatronFSDP: (dp, cp, tp); DDP: None.
        moe_mesh: (ep_shard, ep) across the ranks of one pipeline stage; None without expert parallelism.
        device: Where this rank computes.
    """

    sizes: ParallelSizes
    device_mesh: DeviceMesh | None
    moe_mesh: DeviceMesh | None
    device: torch.device

    @classmethod
    def build(cls, config: DistributedConfig, sizes: ParallelismSizes | None = None) -> MeshContext:
        """Call `build_mesh_context` with the sizes in one object."""
        return build_mesh_context(config, **vars(sizes or ParallelismSizes()))

    @classmethod
    def from_meshes(
        cls, config: DistributedConfig, device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None = None
    ) -> MeshContext:
        """Build a context from existing meshes; collective if a flattened axis is missing.

        Args:
            config: The strategy.
            device_mesh: Of all ranks, with the axes of the attribute `device_mesh` for this strategy.
            moe_mesh: (ep_shard, ep), for `FSDP2Config`.

        Raises:
            ConfigurationError: A mesh has other axes, or DDP is given one.
            ParallelSizeError: The sizes of the axes do not fit the strategy or the ranks.
        """
        axes = FSDP2_AXES if isinstance(config, FSDP2Config) else MEGATRON_AXES
        names = [None if mesh is None else mesh.mesh_dim_names for mesh in (device_mesh, moe_mesh)]
        if isinstance(config, DDPConfig) or names[0] != axes or names[1] not in (None, EXPERT_AXES):
            raise ConfigurationError(
                f"device_mesh has the axes {names[0]} and moe_mesh {names[1]}, and {type(config).__name__} takes "
                f"{'none' if isinstance(config, DDPConfig) else f'{axes} and {EXPERT_AXES} or None'}; make them by "
                "create_device_mesh(config, ...), or give sizes"
            )
        length = {name: device_mesh[name].size() for name in axes}
        copies = length.get("dp_replicate", 1)
        sizes = resolve_sizes(
            config,
            dist.get_world_size(),
            dp_size=copies * length["dp_shard"] if "dp_shard" in length else length["dp"],
            dp_replicate_size=copies,
            tp_size=length["tp"],
            pp_size=length.get("pp"),
            cp_size=length["cp"],
            ep_size=None if moe_mesh is None else moe_mesh["ep"].size(),
        )
        _add_flattened(device_mesh)
        return cls(sizes, device_mesh, moe_mesh, set_up_ranks(config.backend))

    def axis(self, name: str) -> DeviceMesh:
        """Return one axis, flattened ones included.

        Raises:
            ConfigurationError: There is none of the name.
        """
        if self.device_mesh is None:
            raise ConfigurationError(f"there is no mesh, so no axis {name!r}; DDP has none")
        return get_flat_mesh(self.device_mesh, name)

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the data, below `sizes.dp`.

        Tensor-, context- and pipeline-parallel ranks read the same part; context-parallel ones cut its sequences by
        `shard_batch`.
        """
        if self.device_mesh is None:
            return dist.get_rank()
        return self.axis("dp").get_local_rank()

    def gradient_axis(self) -> DeviceMesh:
        """Return the mesh over which gradients of dense parameters are averaged: data- and context-parallel ranks.

        Raises:
            ConfigurationError: There is no mesh.
        """
        is_engine = self.device_mesh is not None and self.device_mesh.mesh_dim_names == MEGATRON_AXES
        return self.axis("dp" if is_engine and self.sizes.cp == 1 else "dp_cp")


def build_mesh_context(config: DistributedConfig, **sizes: int | None) -> MeshContext:
    """Check the sizes and build the meshes; collective. Process groups are created if there are none.

    Args:
        config: The strategy.
        sizes: `dp_size`, `dp_replicate_size`, `tp_size`, `pp_size`, `cp_size` and `ep_size`, as of `resolve_sizes`.

    Raises:
        ParallelSizeError: See `resolve_sizes`.
    """
    device = set_up_ranks(check_config(config).backend)
    resolved = resolve_sizes(config, dist.get_world_size(), **sizes)
    return MeshContext(resolved, *_meshes(config, resolved, device.type), device)


def create_device_mesh(
    config: DistributedConfig, *, world_size: int | None = None, **sizes: int | None
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Build the mesh and the mesh of experts, as `build_mesh_context` does; (None, None) for DDP.

    Args:
        config: The strategy.
        world_size: None: what torch.distributed says; another number is refused.
        sizes: As of `build_mesh_context`.

    Raises:
        ParallelSizeError: See `resolve_sizes`.
        ConfigurationError: `world_size` is not the number of ranks.
    """
    set_up_ranks(check_config(config).backend)
    ranks = dist.get_world_size()
    if world_size not in (None, ranks):
        raise ConfigurationError(f"world_size={world_size}, but there are {ranks} ranks; leave it out")
    context = build_mesh_context(config, **sizes)
    return context.device_mesh, context.moe_mesh


def set_up_ranks(backend: str) -> torch.device:
    """Initialise torch.distributed if needed; return this rank's device.

    Under torchrun the default group has all ranks; in a program started without it, only this one. Without an
    accelerator, "nccl" (the default of the configs) falls back to CPUs with a warning.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if backend == "nccl" and accelerator is None:
        warn_caller("backend='nccl', but there is no accelerator here: ranks compute on CPUs; write backend='gloo'")
        backend = "gloo"
    if backend == "gloo" or accelerator is None:
        device = torch.device("cpu")
    else:
        local_rank = os.environ.get("LOCAL_RANK")  # without torchrun, the program has chosen its device itself
        local = torch.accelerator.current_device_index() if local_rank is None else int(local_rank)
        local %= torch.accelerator.device_count()
        device = torch.device(accelerator.type, local)
        torch.accelerator.set_device_index(local)
    if not dist.is_initialized():
        bound = bound_device(backend, device)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, device_id=bound)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=bound)
    return device


def get_flat_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return one axis of a mesh or of its root, flattened ones included."""
    if name in (mesh.mesh_dim_names or ()):
        return mesh if mesh.ndim == 1 else mesh[name]
    root = mesh._get_root_mesh()
    found: DeviceMesh | None = root._flatten_mapping.get(name)
    if found is None:
        known = [*(root.mesh_dim_names or ()), *root._flatten_mapping]
        raise ConfigurationError(f"the mesh has no axis {name!r}; it has {', '.join(known)}")
    return found


def get_submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return several axes of a mesh as one, flattened ones included."""
    if all(name in (mesh.mesh_dim_names or ()) for name in names):
        return mesh[tuple(names)]
    return DeviceMesh._concatenate([get_flat_mesh(mesh, name) for name in names])


def get_fsdp_dp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards, context-parallel ranks included: (shards) or (replicas, shards)."""
    shards = "dp_shard_cp" if get_flat_mesh(mesh, "cp").size() > 1 else "dp_shard"
    if get_flat_mesh(mesh, "dp_replicate").size() > 1:
        return get_submesh(mesh, ("dp_replicate", shards))
    return get_flat_mesh(mesh, shards)


def get_megatron_dp_axis(mesh: DeviceMesh) -> str:
    """Return the name of the engine's sharding axis, which includes context-parallel ranks."""
    return "dp_cp" if get_flat_mesh(mesh, "cp").size() > 1 else "dp"


def _meshes(
    config: DistributedConfig, sizes: ParallelSizes, device_type: str
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    if isinstance(config, DDPConfig):
        return None, None
    shape: tuple[int, ...] = (sizes.dp, sizes.cp, sizes.tp)
    axes: tuple[str, ...] = MEGATRON_AXES
    if isinstance(config, FSDP2Config):
        shape, axes = (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp), FSDP2_AXES
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    _add_flattened(mesh)
    if sizes.ep == 1:
        return mesh, None
    experts = init_device_mesh(
        device_type, (sizes.pp, sizes.ep_shard, sizes.ep), mesh_dim_names=("pp_of_experts", *EXPERT_AXES)
    )
    return mesh, experts[EXPERT_AXES]


def _add_flattened(mesh: DeviceMesh) -> None:
    """Add the missing axes across several."""
    axes = mesh.mesh_dim_names
    assert axes is not None
    for name, parts in _FLATTENED[axes].items():
        if name not in mesh._get_root_mesh()._flatten_mapping and (axes != MEGATRON_AXES or mesh["cp"].size() > 1):
            mesh[parts]._flatten(name)
