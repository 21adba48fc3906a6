"""The ranks that share parameters: a domain of dense ones, and another of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.axis import Axis, Traffic, real_values
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex


@dataclass(frozen=True)
class FlatAxis:
    """All ranks of a hybrid mesh as one axis.

    Attributes:
        axis: The axis; a rank's place on it is the number of its microbatch.
        shares: For each rank, which of as many equal parts of a flat buffer is its own (see `held_region`).
    """

    axis: Axis
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Domain:
    """The ranks that share parameters of one kind: dense ones, or experts, which have a mesh of their own.

    Attributes:
        axes: The data-parallel axes, outermost first; the last one is the sharding axis.
        names: Their names in the mesh.
        group: All data-parallel ranks; None for a single one.
        tensor_parallel: The tensor-parallel mesh, one-dimensional; None where there is none.
        described_mesh: The mesh of the sharded parameters' DTensors: the axes and, last, the tensor-parallel dimension.
        foreign_groups: For experts, groups of ranks that hold other experts, one per further dimension of their mesh.
        flat: All data-parallel ranks of a hybrid mesh as one axis, where gradients are added rank by rank; else None.
    """

    axes: tuple[Axis, ...]
    names: tuple[str, ...]
    group: dist.ProcessGroup | None
    tensor_parallel: DeviceMesh | None
    described_mesh: DeviceMesh
    foreign_groups: tuple[dist.ProcessGroup, ...] = field(default=())
    flat: FlatAxis | None = None

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
    index: FSDPDistributedIndex,
    traffic: Mapping[str, Traffic],
    is_expert: bool = False,
    sums_locally: bool = False,
    one_by_one: bool = False,
) -> Domain:
    """Build the domain of one kind of parameters from an index."""
    assert index.dp_shard_dim is not None
    names = tuple(name for name in (index.dp_outer_dim, index.dp_shard_dim) if name is not None)
    axes = tuple(replace(_axis(index, name, traffic[name], is_expert), sums_locally=sums_locally) for name in names)
    tensor_parallel = index.get_submesh((index.tp_dim,), is_expert) if index.tp_dim is not None else None
    described = names if index.tp_dim is None else (*names, index.tp_dim)
    num_ranks = prod(axis.num_ranks for axis in axes)
    group = index.get_dp_group(is_expert) if num_ranks > 1 else None
    return Domain(
        axes=axes,
        names=names,
        group=group,
        tensor_parallel=tensor_parallel,
        described_mesh=index.get_submesh(described, is_expert),
        foreign_groups=_foreign_groups(index) if is_expert else (),
        flat=_flat_axis(index, axes, group) if one_by_one else None,
    )


def _flat_axis(index: FSDPDistributedIndex, axes: Sequence[Axis], group: dist.ProcessGroup | None) -> FlatAxis | None:
    """Make one axis of both axes of a hybrid mesh; None where the outer one has one rank, or there is none."""
    if group is None or len(axes) == 1 or axes[0].num_ranks == 1:
        return None
    assert index.dp_outer_dim is not None
    assert index.dp_shard_dim is not None
    table = index.get_submesh((index.dp_outer_dim, index.dp_shard_dim)).mesh.tolist()
    columns = list(zip(*table, strict=True))
    place = {  # the ranks of an axis are in the order of its group, which is ascending
        rank: sorted(row).index(rank) * len(table) + sorted(column).index(rank)
        for row in table
        for rank, column in zip(row, columns, strict=True)
    }
    ranks = dist.get_process_group_ranks(group)
    axis = Axis(group, dist.get_rank(group), len(ranks), axes[-1].traffic, sums_locally=True)
    return FlatAxis(axis, tuple(place[rank] for rank in ranks))


def _axis(index: FSDPDistributedIndex, name: str, traffic: Traffic, is_expert: bool) -> Axis:
    mesh = index.get_submesh((name,), is_expert)
    num_ranks = mesh.size()
    group = mesh.get_group() if num_ranks > 1 else None
    gather_group = None
    if name == index.dp_shard_dim and group is not None:
        gather_group = index.get_fsdp_group(is_expert, independent_all_gather=True)
    # Not the coordinate on the mesh: a mesh may list ranks out of order, and its group has them in order.
    rank = dist.get_rank(group) if group is not None else 0
    return Axis(group, rank, num_ranks, traffic, gather_group)


def _foreign_groups(index: FSDPDistributedIndex) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups along the dimensions of the expert mesh that are neither data nor tensor parallel."""
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
