"""From the arguments of `fully_shard` that name a mesh, dimensions and groups to the index that the engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.buffer.lanes import default_device
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.placement import ShardingStrategy, resolve_strategy


def index_of(arguments: Mapping[str, Any]) -> FSDPDistributedIndex:
    """Find or build the mesh, and check its dimensions.

    Args:
        arguments: Those of `fully_shard_model`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "torch.distributed is not initialised; start the program with torchrun and call "
            "torch.distributed.init_process_group() before sharding"
        )
    mesh, shard_dim, tp_dim = (arguments[name] for name in ("device_mesh", "dp_shard_dim", "tp_dim"))
    if mesh is None:
        _refuse_without_mesh(arguments)
        shard_dim = shard_dim or "fsdp"
        names = (shard_dim,) if tp_dim is None else (shard_dim, tp_dim)
        shape = (dist.get_world_size(), *(1 for _ in names[1:]))
        mesh = init_device_mesh(default_device().type, shape, mesh_dim_names=names)
    elif shard_dim is None and mesh.ndim == 1 and mesh.mesh_dim_names:
        shard_dim = mesh.mesh_dim_names[0]
    outer = resolve_strategy(arguments["outer_dp_sharding_strategy"], "outer_dp_sharding_strategy")
    return FSDPDistributedIndex(
        mesh,
        shard_dim,
        arguments["dp_outer_dim"],
        tp_dim or _tensor_parallel_dim(arguments["module"], mesh),
        arguments["hybrid_fsdp_group"],
        arguments["hybrid_fsdp_expt_group"],
        hsdp_outer_dp_shard=arguments["dp_outer_dim"] is not None and outer is ShardingStrategy.optim,
        expt_device_mesh=arguments["expt_device_mesh"],
        fsdp_group_ag=arguments["fsdp_group_ag"],
        expt_fsdp_group_ag=arguments["expt_fsdp_group_ag"],
    )


_NEED_A_MESH = ("dp_outer_dim", "hybrid_fsdp_expt_group", "expt_device_mesh", "fsdp_group_ag", "expt_fsdp_group_ag")


def _refuse_without_mesh(arguments: Mapping[str, Any]) -> None:
    given = [name for name in _NEED_A_MESH if arguments[name] is not None]
    if given:
        raise ConfigurationError(
            f"{', '.join(given)} cannot take effect without device_mesh, where all ranks lie on one axis; pass the mesh"
        )


def _tensor_parallel_dim(module: nn.Module, mesh: DeviceMesh) -> str | None:
    """The mesh dimension that parameters are DTensors over already; None where they are plain or name another one."""
    named = (p.device_mesh.mesh_dim_names for p in module.parameters() if isinstance(p, DTensor))
    found = {names[0] for names in named if names is not None and len(names) == 1}
    found &= set(mesh.mesh_dim_names or ())
    return found.pop() if len(found) == 1 else None
