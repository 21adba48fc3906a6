"""Division of the data-parallel ranks into instances of the distributed optimizer."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex

INSTANCE_SUFFIX = "_instances"
SHARD_SUFFIX = "_shard"


@real_values()
def cut_into_instances(
    index: FSDPDistributedIndex, instances: int, outer_strategy: ShardingStrategy
) -> FSDPDistributedIndex:
    """Cut the data-parallel dimension of an index in two; makes process groups, so every rank of the mesh calls it.

    Neighbouring ranks form an instance: of 8 ranks in 2 instances, the first four shard one optimizer.

    Raises:
        ConfigurationError: The dimension is a flattened one, or the instances do not divide its ranks.
    """
    dim = index.dp_shard_dim
    assert dim is not None
    experts = index.expt_device_mesh
    return FSDPDistributedIndex(
        _cut(index.device_mesh, dim, instances),
        dim + SHARD_SUFFIX,
        dim + INSTANCE_SUFFIX,
        index.tp_dim,
        index.fsdp_group,
        index.expt_fsdp_group,
        hsdp_outer_dp_shard=outer_strategy is ShardingStrategy.optim,
        expt_device_mesh=None if experts is None else _cut(experts, dim, instances),
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
