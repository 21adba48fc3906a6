"""How ranks are arranged: their meshes and groups, who computes which data, and who holds which part of the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.models import Batch

Values = Mapping[str, Tensor | None]


def _no_arguments() -> dict[str, Any]:
    return {}


def _leave(module: nn.Module) -> None:
    """Keep the model whole."""


def _part_of_rank(whole: Batch) -> Batch:
    return whole.part(dist.get_rank(), dist.get_world_size())


def _as_they_are(values: Values) -> Values:
    return values


@dataclass(frozen=True)
class Arrangement:
    """What one rank does beside plain data parallelism over all ranks; all functions run on the rank.

    Attributes:
        name: For messages.
        arguments: () -> what `fully_shard` is told of meshes and groups.
        place: Turns the whole model into what this rank computes with, in place, before sharding.
        part: (batch of all ranks) -> the data that this rank computes.
        whole: (what this rank's data-parallel ranks hold together) -> the tensors of the whole model. Collective.
    """

    name: str = "flat"
    arguments: Callable[[], dict[str, Any]] = _no_arguments
    place: Callable[[nn.Module], None] = _leave
    part: Callable[[Batch], Batch] = _part_of_rank
    whole: Callable[[Values], Values] = _as_they_are


FLAT = Arrangement()
"""All ranks on one axis."""


# Process groups are dear (threads until the process ends), so every worker makes each mesh once.


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The CPU mesh over all ranks, the same object every time."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def flattened(mesh: DeviceMesh, names: tuple[str, ...], flat_name: str) -> DeviceMesh:
    """One axis made of several, which the root mesh then knows by a name of its own."""
    return mesh[names]._flatten(flat_name)


@cache
def second_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One more group of all ranks of a one-dimensional mesh.

    Every rank has to call this in the same order for its own sub-mesh of one mesh.
    """
    group, _ = dist.new_subgroups_by_enumeration(_all_rows(mesh))
    return group


def _all_rows(mesh: DeviceMesh) -> list[list[int]]:
    mine = tuple(dist.get_process_group_ranks(mesh.get_group()))
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    return [list(row) for row in dict.fromkeys(rows)]


# ---- hybrid ----------------------------------------------------------------------------------------------------------


def hybrid_arguments(outer: int, inner: int) -> dict[str, Any]:
    """Arguments of hybrid sharding on `outer * inner` ranks, the outer axis first."""
    mesh = mesh_of((outer, inner), ("dp_outer", "dp_shard"))
    group = flattened(mesh, ("dp_outer", "dp_shard"), "dp_all").get_group()
    return {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer", "hybrid_fsdp_group": group}


def hybrid(outer: int, inner: int) -> Arrangement:
    """Hybrid sharding on `outer * inner` ranks."""
    return Arrangement(f"hybrid {outer}x{inner}", partial(hybrid_arguments, outer, inner))
