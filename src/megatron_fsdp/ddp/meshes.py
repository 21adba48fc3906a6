"""From the caller's mesh to the index of the engine: data-parallel ranks cut into instances of the optimizer."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.mesh_arguments import index_from_mesh, mesh_and_dim
from megatron_fsdp.placement import ShardingStrategy, resolve_strategy

INSTANCE_SUFFIX = "_instances"
SHARD_SUFFIX = "_shard"


def index_of_instances(
    config: DistributedDataParallelConfig,
    module: nn.Module,
    device_mesh: DeviceMesh | None,
    dp_dim: str | None,
    tp_dim: str | None,
    expt_device_mesh: DeviceMesh | None,
) -> FSDPDistributedIndex:
    """Find or build the mesh; with several instances of the optimizer, cut its data-parallel dimension in two.

    Neighbouring ranks form an instance: of 8 ranks in 2 instances, the first four shard one optimizer.

    Args:
        config: For the number of instances.
        module: For the tensor-parallel dimension, where `tp_dim` is None.
        device_mesh: The mesh; None: all ranks.
        dp_dim: Its data-parallel dimension.
        tp_dim: Its tensor-parallel dimension.
        expt_device_mesh: The mesh of experts.

    Raises:
        ConfigurationError: The mesh has no such dimension, or cannot be cut into so many instances.
    """
    mesh, dim = mesh_and_dim(device_mesh, dp_dim, tp_dim, "dp_dim")
    instances = config.num_distributed_optimizer_instances
    if instances == 1:
        return index_from_mesh(mesh, dim, module, tp_dim=tp_dim, expt_device_mesh=expt_device_mesh)
    cut = _cut(mesh, dim, instances)
    cut_experts = None if expt_device_mesh is None else _cut(expt_device_mesh, dim, instances)
    outer = resolve_strategy(config.outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
    return index_from_mesh(
        cut,
        dim + SHARD_SUFFIX,
        module,
        dp_outer_dim=dim + INSTANCE_SUFFIX,
        hybrid_fsdp_group=mesh[dim].get_group(),
        hybrid_fsdp_expt_group=None if expt_device_mesh is None else expt_device_mesh[dim].get_group(),
        tp_dim=tp_dim,
        expt_device_mesh=cut_experts,
        shards_outside=outer is ShardingStrategy.optim,
    )


def _cut(mesh: DeviceMesh, dim: str, instances: int) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    if dim not in names:
        raise ConfigurationError(
            f"num_distributed_optimizer_instances={instances} cuts the mesh dimension {dim!r}, which is not one of "
            f"{names} (a flattened dimension cannot be cut); name another one or use one instance"
        )
    size = mesh.size(names.index(dim))
    if size % instances:
        raise ConfigurationError(
            f"num_distributed_optimizer_instances={instances} does not divide the {size} ranks of mesh dimension "
            f"{dim!r}; give a divisor"
        )
    cut: DeviceMesh = mesh._unflatten(
        names.index(dim), (instances, size // instances), (dim + INSTANCE_SUFFIX, dim + SHARD_SUFFIX)
    )
    return cut
