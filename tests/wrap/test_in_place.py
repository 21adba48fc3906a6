"""Sharding by one call per unit, without a door: what a wrong order of calls is told."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.engine.plans import Sharding
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.sharding.mesh import rank_mesh_of
from megatron_fsdp.sharding.placement import placements_for
from megatron_fsdp.wrap.shard_unit import KnownPlans, finish_in_place, shard_in_place
from tests.support.on_ranks import on_ranks, refusal


@on_ranks(2)
def test_a_wrong_order_of_calls_is_refused_and_the_right_one_trains() -> None:
    ranks = dist.get_world_size()
    rank_mesh = rank_mesh_of(init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), {})
    placements = placements_for(ShardingStrategy.optim_grads_params)
    sharding = Sharding(EngineOptions(), rank_mesh, placements, torch.device("cpu"), divisor=ranks)
    mode, known = SyncMode(), KnownPlans()

    def shard(module: nn.Module) -> None:
        shard_in_place([module], sharding, mode, known)

    first, head = nn.Linear(4, 4), nn.Embedding(4, 4)
    head.weight = first.weight
    model = nn.Sequential(first, nn.Linear(4, 2))
    expected = model(torch.ones(3, 4))
    shard(first)
    twice = "weight of Linear is sharded already; shard a module once, and inner modules before those around them"
    assert refusal(shard, first) == twice
    tied = refusal(shard, head)
    assert tied.startswith("weight of Embedding is tied to weight of Linear, which another unit owns already")
    early = "; Linear called it: where it was sharded by one call per unit, it runs only after its context or finish"
    assert early in refusal(first, torch.ones(3, 4))
    shard(model)
    assert refusal(shard, model[1]) == twice
    finish_in_place([model], EngineOptions(), mode)
    torch.testing.assert_close(model(torch.ones(3, 4)), expected)
