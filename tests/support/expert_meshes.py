"""Arrangements of 4 ranks in which each holds a part of the experts."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.arrangements import Arrangement, Values, flattened, hybrid_arguments, mesh_of
from tests.support.mixture import divide_experts

Sizes = tuple[tuple[str, int], ...]
"""Name and ranks of each dimension of the expert mesh, outermost first: "ep", "dp_shard" and maybe "dp_outer"."""

FLAT: Sizes = (("ep", 2), ("dp_shard", 2))


def expert_mesh(sizes: Sizes) -> DeviceMesh:
    """The mesh of expert parameters."""
    return mesh_of(tuple(size for _, size in sizes), tuple(name for name, _ in sizes))


def place(sizes: Sizes, model: nn.Module) -> None:
    """Leave a rank its experts."""
    divide_experts(model, expert_mesh(sizes)["ep"].get_group())


def whole(sizes: Sizes, experts_name: str, values: Values) -> Values:
    """Put the experts of all expert-parallel ranks together along dimension 0."""
    group = expert_mesh(sizes)["ep"].get_group()
    return {name: _all_experts(value, group) if experts_name in name else value for name, value in values.items()}


def _all_experts(value: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
    if value is None:
        return None
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts)


def arguments(sizes: Sizes) -> dict[str, Any]:
    """Experts on the expert mesh, all else on all ranks: one axis, or 2 x 2 where the experts have an outer one."""
    mesh = expert_mesh(sizes)
    if "dp_outer" not in dict(sizes):
        dense = mesh_of((dist.get_world_size(),), ("dp_shard",))
        return {"device_mesh": dense, "dp_shard_dim": "dp_shard", "expt_device_mesh": mesh}
    group = flattened(mesh, ("dp_outer", "dp_shard"), "expert_dp").get_group()
    return {**hybrid_arguments(2, 2), "expt_device_mesh": mesh, "hybrid_fsdp_expt_group": group}


def experts_of(sizes: Sizes, experts_name: str = ".experts.") -> Arrangement:
    """Expert parallelism on an expert mesh."""
    return Arrangement(
        "experts " + " x ".join(f"{name} {size}" for name, size in sizes),
        partial(arguments, sizes),
        partial(place, sizes),
        whole=partial(whole, sizes, experts_name),
    )
