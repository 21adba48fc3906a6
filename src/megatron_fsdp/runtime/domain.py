"""The ranks that share parameters of one kind: dense ones, or experts, which live on a mesh of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.buffer.collectives import Axis, Traffic
from megatron_fsdp.buffer.real_values import real_values
from megatron_fsdp.distributed_index import FSDPDistributedIndex


@dataclass(frozen=True)
class Domain:
    """Where the parameters of one kind lie.

    Attributes:
        axes: The data-parallel axes, outermost first; the last one is the sharding axis.
        names: Their names in the mesh.
        group: All data-parallel ranks; None for a single one.
        tensor_parallel: The tensor-parallel mesh, one-dimensional; None where there is none.
        described_mesh: What sharded parameters are described on: the axes and, last, the tensor-parallel dimension.
        foreign_groups: For experts, groups of ranks that hold other experts, one per further dimension of their mesh.
    """

    axes: tuple[Axis, ...]
    names: tuple[str, ...]
    group: dist.ProcessGroup | None
    tensor_parallel: DeviceMesh | None
    described_mesh: DeviceMesh
    foreign_groups: tuple[dist.ProcessGroup, ...] = field(default=())

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, all axes together."""
        return prod(axis.num_ranks for axis in self.axes)

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks; None for a single one."""
        mesh = self.tensor_parallel
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()


@real_values()
def make_domain(
    index: FSDPDistributedIndex, traffic: Mapping[str, Traffic], is_expert: bool = False, sums_locally: bool = False
) -> Domain:
    """Read off an index what the parameters of one kind need.

    Args:
        index: Mesh and groups.
        traffic: The counters of each axis, by the name of its dimension.
        is_expert: Whether for experts.
        sums_locally: Reduce-scatter by an all-to-all and a local sum on any back end.
    """
    assert index.dp_shard_dim is not None
    names = tuple(name for name in (index.dp_outer_dim, index.dp_shard_dim) if name is not None)
    axes = tuple(replace(_axis(index, name, traffic[name], is_expert), sums_locally=sums_locally) for name in names)
    tensor_parallel = index.get_submesh((index.tp_dim,), is_expert) if index.tp_dim is not None else None
    described = names if index.tp_dim is None else (*names, index.tp_dim)
    num_ranks = prod(axis.num_ranks for axis in axes)
    return Domain(
        axes=axes,
        names=names,
        group=index.get_dp_group(is_expert) if num_ranks > 1 else None,
        tensor_parallel=tensor_parallel,
        described_mesh=index.get_submesh(described, is_expert),
        foreign_groups=_foreign_groups(index) if is_expert else (),
    )


def _axis(index: FSDPDistributedIndex, name: str, traffic: Traffic, is_expert: bool) -> Axis:
    mesh = index.get_submesh((name,), is_expert)
    num_ranks = mesh.size()
    group = mesh.get_group() if num_ranks > 1 else None
    gather_group = None
    if name == index.dp_shard_dim and group is not None:
        gather_group = index.get_fsdp_group(is_expert, independent_all_gather=True)
    # Not the place on the mesh: where a mesh lists ranks out of order, its group has them in order all the same.
    rank = dist.get_rank(group) if group is not None else 0
    return Axis(group, rank, num_ranks, traffic, gather_group)


def _foreign_groups(index: FSDPDistributedIndex) -> tuple[dist.ProcessGroup, ...]:
    """Groups along the dimensions of the expert mesh that are neither data nor tensor parallel."""
    mesh = index.expt_device_mesh
    assert mesh is not None
    here = dist.get_rank()
    own: set[int] = set()
    for group in (index.expt_outer_fsdp_group, index.expt_fsdp_group):
        own.update(dist.get_process_group_ranks(group) if group is not None else ())
    if index.tp_dim is not None:
        own.update(index.get_submesh((index.tp_dim,), True).mesh.flatten().tolist())
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
    return tuple(
        group
        for group in groups
        if dist.get_world_size(group) > 1 and not (set(dist.get_process_group_ranks(group)) - {here}) & own
    )
