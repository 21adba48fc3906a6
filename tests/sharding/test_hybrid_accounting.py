"""What the outer axis costs: the formulas, and the engine held to them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.strategy import ShardingStrategy
from tests.support.api_net import Layer, build
from tests.support.arrangements import hybrid_arguments
from tests.support.formulas import (
    GroupFootprint,
    footprints_of,
    outer_step_traffic,
    persistent_bytes,
    step_traffic,
)
from tests.support.on_ranks import on_ranks

F32 = torch.float32
GROUP = GroupFootprint(1, 96, 2, F32, F32, F32, torch.bfloat16, True, outer_ranks=3)
ZERO3, NO_SHARD = ShardingStrategy.optim_grads_params, ShardingStrategy.no_shard


def test_what_crosses_the_outer_axis() -> None:
    part_bytes = 96 // 2 * 2  # bfloat16
    assert outer_step_traffic([GROUP], ZERO3) == Traffic(0, 1, 0, 2 * (part_bytes - part_bytes // 3))
    shared = replace(GROUP, outer_shares=True)
    sent = 48 * 2 - 48 * 2 // 3
    assert outer_step_traffic([shared], ZERO3) == Traffic(1, 1, 48 * 4 - 48 * 4 // 3, sent)
    alone, cut = persistent_bytes([GROUP], ZERO3), persistent_bytes([shared], ZERO3)
    assert (alone.compute_weight, cut.compute_weight) == (192, 192)
    assert (alone.main_grad, cut.main_grad) == (192, 64)
    assert (alone.optimizer, cut.optimizer) == (384, 128)
    whole = Traffic(0, 1, 0, 2 * (96 * 2 - 96 * 2 // 3))
    assert outer_step_traffic([GROUP], NO_SHARD) == whole
    assert outer_step_traffic([replace(GROUP, is_whole=True, outer_shares=True)], ZERO3) == whole
    assert outer_step_traffic([replace(GROUP, outer_ranks=1)], ZERO3) == Traffic(0, 0, 0, 0)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("strategy", "outer"), [(0, 0), (1, 1), (3, 0)])
@on_ranks(4)
def test_the_engine_sends_what_the_formulas_say(strategy: int, outer: int) -> None:
    model = build()
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters()),
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=outer,
        **hybrid_arguments(2, 2),
    )
    before = model.traffic_by_axis()
    for _ in range(3):
        before = model.traffic_by_axis()
        _train(model, optimizer)
    after = model.traffic_by_axis()
    inside, across = (after[name].since(before[name]) for name in ("dp_shard", "dp_outer"))
    footprints, wanted = footprints_of(model), ShardingStrategy(strategy)
    assert inside == step_traffic(footprints, wanted)
    assert across == outer_step_traffic(footprints, wanted)
    assert across.reductions > 0
