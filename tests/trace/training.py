"""Small training runs on ranks, recorded or not."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.trace import Timeline, trace
from tests.support.arrangements import hybrid_arguments
from tests.support.formulas import footprints_of
from tests.support.on_ranks import fixed_seed
from tests.support.zoo import TOWER_FEATURES, Floor, Tower, tower_loss

Wrapped = tuple[MegatronFSDP, torch.optim.Optimizer]


def sharded_tower(
    strategy: int = 3, outer: tuple[int, int, int] | None = None, device: str = "cpu", **options: Any
) -> Wrapped:
    """A tower on all ranks; `outer` is (outer strategy, outer ranks, inner ranks)."""
    with fixed_seed(0):
        model = Tower().to(device)
    if outer is None:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
        meshes: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp"}
    else:
        meshes = {**hybrid_arguments(outer[1], outer[2]), "outer_dp_sharding_strategy": outer[0]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return fully_shard(model, optimizer, fsdp_unit_modules=[Floor], zero_dp_strategy=strategy, **meshes, **options)


def data(step: int = 0) -> torch.Tensor:
    """A batch of this rank."""
    values = torch.linspace(-1, 1, 4 * TOWER_FEATURES).view(4, TOWER_FEATURES)
    return values * (1 + dist.get_rank()) + step / 8


def plain(model: MegatronFSDP, x: torch.Tensor) -> list[float]:
    """One microbatch."""
    loss = tower_loss(model, x)
    loss.backward()
    return [loss.item()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's shard; asking for whole tensors would send something."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def train(wrapped: Wrapped, is_traced: bool, steps: int = 3) -> tuple[dict[str, Any], Timeline | None]:
    """Losses, gradients, weights and traffic of some steps, of which the first is never recorded."""
    model, optimizer = wrapped
    losses, gradients, recording = [], {}, None
    for step in range(steps):
        if step == 1:
            before = model.traffic()
            by_axis = model.traffic_by_axis()
            context = trace(model) if is_traced else nullcontext()
            recording = context.__enter__()
        optimizer.zero_grad()
        losses += plain(model, data(step).to(next(model.parameters()).device))
        gradients = {name: local(param.grad) for name, param in model.named_parameters() if param.grad is not None}
        optimizer.step()
    context.__exit__(None, None, None)
    values = {
        "losses": losses,
        "gradients": gradients,
        "weights": {name: local(param.data) for name, param in model.named_parameters()},
        "traffic": model.traffic().since(before),
        "by_axis": {name: sent.since(by_axis[name]) for name, sent in model.traffic_by_axis().items()},
        "footprints": footprints_of(model),
    }
    return values, None if recording is None else recording.result()
