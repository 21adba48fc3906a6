"""Arrangements of 4 ranks in which each holds a part of the experts."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.arrangements import Arrangement, Values, flattened, hybrid_arguments, mesh_of
from tests.support.parallel_transformer import divide_experts

EXPERT_DIMS = ("dp_outer", "ep", "dp_shard")


def expert_mesh(outer: int, expert: int, shard: int) -> DeviceMesh:
    """The mesh of expert parameters; without the outer dimension where that has one rank."""
    if outer == 1:
        return mesh_of((expert, shard), EXPERT_DIMS[1:])
    return mesh_of((outer, expert, shard), EXPERT_DIMS)


def place(sizes: tuple[int, int, int], model: nn.Module) -> None:
    divide_experts(model, expert_mesh(*sizes)["ep"].get_group())


def whole(sizes: tuple[int, int, int], experts_name: str, values: Values) -> Values:
    """Put the experts of all expert-parallel ranks together along dimension 0."""
    group = expert_mesh(*sizes)["ep"].get_group()
    return {name: _all_experts(value, group) if experts_name in name else value for name, value in values.items()}


def _all_experts(value: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
    if value is None:
        return None
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts)


def arguments(sizes: tuple[int, int, int]) -> dict[str, Any]:
    """All ranks on one dense axis (with outer ranks: on two), experts on the expert mesh."""
    mesh = expert_mesh(*sizes)
    if sizes[0] == 1:
        dense = mesh_of((dist.get_world_size(),), ("dp_shard",))
        return {"device_mesh": dense, "dp_shard_dim": "dp_shard", "expt_device_mesh": mesh}
    outer, ranks_of_expert = sizes[0], sizes[0] * sizes[2]
    group = flattened(mesh, ("dp_outer", "dp_shard"), "expert_dp").get_group()
    assert dist.get_world_size(group) == ranks_of_expert
    return {
        **hybrid_arguments(outer, dist.get_world_size() // outer),
        "expt_device_mesh": mesh,
        "hybrid_fsdp_expt_group": group,
    }


def experts_of(outer: int, expert: int, shard: int, experts_name: str = ".experts.") -> Arrangement:
    """Expert parallelism on `outer * expert * shard` ranks."""
    sizes = (outer, expert, shard)
    return Arrangement(
        f"experts {outer}x{expert}x{shard}",
        partial(arguments, sizes),
        partial(place, sizes),
        whole=partial(whole, sizes, experts_name),
    )
