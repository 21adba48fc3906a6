"""From the arguments of `fully_shard` that name a mesh, dimensions and groups to the index that the engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.buffer.lanes import default_device
from megatron_fsdp.buffer.real_values import real_values
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.placement import ShardingStrategy, resolve_strategy


def index_of(arguments: Mapping[str, Any]) -> FSDPDistributedIndex:
    """Find or build the mesh, and check its dimensions.

    Args:
        arguments: Those of `fully_shard_model`.
    """
    if arguments["device_mesh"] is None:
        _refuse_without_mesh(arguments)
    tp_dim = arguments["tp_dim"]
    mesh, shard_dim = mesh_and_dim(arguments["device_mesh"], arguments["dp_shard_dim"], tp_dim, "dp_shard_dim")
    outer = resolve_strategy(arguments["outer_dp_sharding_strategy"], "outer_dp_sharding_strategy")
    return index_from_mesh(
        mesh,
        shard_dim,
        arguments["module"],
        dp_outer_dim=arguments["dp_outer_dim"],
        tp_dim=tp_dim,
        hybrid_fsdp_group=arguments["hybrid_fsdp_group"],
        hybrid_fsdp_expt_group=arguments["hybrid_fsdp_expt_group"],
        shards_outside=arguments["dp_outer_dim"] is not None and outer is ShardingStrategy.optim,
        expt_device_mesh=arguments["expt_device_mesh"],
        fsdp_group_ag=arguments["fsdp_group_ag"],
        expt_fsdp_group_ag=arguments["expt_fsdp_group_ag"],
    )


def mesh_and_dim(
    device_mesh: DeviceMesh | None, dim: str | None, tp_dim: str | None, argument: str
) -> tuple[DeviceMesh, str]:
    """The mesh, made of all ranks where none is given, and the name of its data-parallel dimension.

    Args:
        device_mesh: The caller's; None: all ranks on one axis, on the accelerator of this process or the CPU.
        dim: The caller's name; None: the only dimension.
        tp_dim: A tensor-parallel dimension, which has one rank where no mesh is given.
        argument: The name of the argument that `dim` came from, for the error message.

    Raises:
        ConfigurationError: There are no process groups, or no dimension is named and there are several.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "torch.distributed is not initialised; start the program with torchrun and call "
            "torch.distributed.init_process_group() before sharding"
        )
    if device_mesh is None:
        dim = dim or "fsdp"
        names = (dim,) if tp_dim is None else (dim, tp_dim)
        shape = (dist.get_world_size(), *(1 for _ in names[1:]))
        return init_device_mesh(default_device().type, shape, mesh_dim_names=names), dim
    if dim is None and device_mesh.ndim == 1 and device_mesh.mesh_dim_names:
        dim = device_mesh.mesh_dim_names[0]
    if dim is None:
        raise ConfigurationError(
            f"{argument} is missing; name the mesh dimension to shard over, one of {device_mesh.mesh_dim_names}"
        )
    return device_mesh, dim


@real_values()
def index_from_mesh(
    mesh: DeviceMesh,
    shard_dim: str,
    module: nn.Module,
    *,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    shards_outside: bool = False,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
) -> FSDPDistributedIndex:
    """An index; the tensor-parallel dimension is looked for in the model where it is not named.

    Args:
        mesh: The mesh.
        shard_dim: The dimension to shard over.
        module: The model.
        dp_outer_dim: As in `FSDPDistributedIndex`, as those that follow.
        tp_dim: See there; None: what the model's parameters are DTensors over.
        hybrid_fsdp_group: See there.
        hybrid_fsdp_expt_group: See there.
        shards_outside: There `hsdp_outer_dp_shard`.
        expt_device_mesh: See there.
        fsdp_group_ag: See there.
        expt_fsdp_group_ag: See there.
    """
    return FSDPDistributedIndex(
        mesh,
        shard_dim,
        dp_outer_dim,
        tp_dim or _tensor_parallel_dim(module, mesh),
        hybrid_fsdp_group,
        hybrid_fsdp_expt_group,
        hsdp_outer_dp_shard=shards_outside,
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
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
    params = [p for p in module.parameters() if isinstance(p, DTensor) and not hasattr(p, "_megatron_fsdp_model")]
    named = (p.device_mesh.mesh_dim_names for p in params)
    found = {names[0] for names in named if names is not None and len(names) == 1}
    found &= set(mesh.mesh_dim_names or ())
    return found.pop() if len(found) == 1 else None
