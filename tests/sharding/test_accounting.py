"""Memory and traffic formulas against numbers worked out by hand, and the engine held to those of two axes."""

from dataclasses import replace

import pytest
import torch

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.config.strategy import ShardingStrategy
from tests.support.formulas import (
    GroupFootprint,
    PassingBytes,
    PersistentBytes,
    TransientBytes,
    exchange_scratch_bytes,
    outer_step_traffic,
    passing_bytes,
    persistent_bytes,
    step_traffic,
    transient_bytes,
)

BF16, FP32 = torch.bfloat16, torch.float32
NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS = ShardingStrategy


def mixed(unit: int, numel: int, shards: int = 4, trained: bool = True) -> GroupFootprint:
    """bf16 weights and gradients with float32 main weights."""
    return GroupFootprint(unit, numel, shards, BF16, FP32, BF16, BF16, trained)


MODEL = [mixed(0, 800), mixed(1, 1200), mixed(2, 1200), mixed(3, 800)]  # 4000 parameters
P, N = 4000, 4


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (NO_SHARD, PersistentBytes(2 * P, 4 * P, 2 * P, 8 * P)),
        (OPTIM, PersistentBytes(2 * P, 4 * P // N, 2 * P // N, 8 * P // N)),
        (OPTIM_GRADS, PersistentBytes(2 * P, 4 * P // N, 2 * P // N, 8 * P // N)),
        (OPTIM_GRADS_PARAMS, PersistentBytes(2 * P // N, 4 * P // N, 2 * P // N, 8 * P // N)),
    ],
)
def test_mixed_precision_memory_shrinks_strategy_by_strategy(
    strategy: ShardingStrategy, expected: PersistentBytes
) -> None:
    assert persistent_bytes(MODEL, strategy) == expected
    assert persistent_bytes(MODEL, OPTIM, deferred=True).total == 4 * P + 14 * P // N


def test_one_rank_gathers_nothing_and_exchanges_nothing() -> None:
    alone = [mixed(0, 64, shards=1), mixed(1, 128, shards=1)]
    assert transient_bytes(alone, OPTIM_GRADS_PARAMS) == TransientBytes(0, 128 + 256, 0)
    assert exchange_scratch_bytes(alone, OPTIM_GRADS_PARAMS) == 0
    for strategy in ShardingStrategy:
        assert step_traffic([mixed(0, 400, shards=1)], strategy, microbatches=2) == Traffic(0, 0, 0, 0)
    assert passing_bytes(alone, OPTIM_GRADS_PARAMS) == PassingBytes(local_sum=0, cast_grads=4 * 192)


def test_a_group_that_is_held_whole_costs_what_it_costs_unsharded() -> None:
    whole = replace(mixed(0, 3), is_whole=True)
    for strategy in ShardingStrategy:
        assert persistent_bytes([whole], strategy) == persistent_bytes([whole], NO_SHARD)
        assert step_traffic([whole], strategy) == Traffic(0, 1, 0, 2 * (6 - 1))
        assert transient_bytes([whole], strategy) == TransientBytes(0, 128, 0)
        assert exchange_scratch_bytes([whole], strategy) == 0


def test_plain_data_parallelism_sends_two_p_and_a_sharded_optimizer_no_more() -> None:
    assert step_traffic(MODEL, NO_SHARD) == Traffic(0, 4, 0, 2 * 2 * 3000)
    for strategy in (OPTIM, OPTIM_GRADS):
        assert step_traffic(MODEL, strategy) == Traffic(4, 4, 2 * 3000, 2 * 3000)
        assert step_traffic(MODEL, strategy, microbatches=3) == Traffic(4, 12, 2 * 3000, 3 * 2 * 3000)


def test_full_sharding_gathers_again_in_backward_what_did_not_stay() -> None:
    # forward: root, 1, 2, 3; units 2 and 3 stay; backward: 1
    assert step_traffic(MODEL, OPTIM_GRADS_PARAMS, slots=2) == Traffic(5, 4, 2 * (4000 + 1200) * 3 // 4, 6000)
    traffic = step_traffic(MODEL, OPTIM_GRADS_PARAMS, slots=0)
    assert traffic == Traffic(4 + 3, 4, 2 * (4000 + 3200) * 3 // 4, 6000)
    assert traffic.gather_bytes + traffic.reduce_bytes == 2 * (3 * P - 800) * 3 // 4
    assert step_traffic(MODEL, OPTIM_GRADS_PARAMS, slots=3) == Traffic(4, 4, 6000, 6000)
    assert step_traffic(MODEL, OPTIM_GRADS_PARAMS, microbatches=5, slots=9) == Traffic(4, 20, 6000, 30000)
    # the second forward finds root, 1, 2 and gathers 3; the backward then gathers 1
    first, both = (step_traffic(MODEL, OPTIM_GRADS_PARAMS, microbatches=count) for count in (1, 2))
    assert both.gathers - first.gathers == 2
    assert both.gather_bytes - first.gather_bytes == 2 * (800 + 1200) * 3 // 4
    assert both.reductions == 2 * first.reductions == 8


# ---- allocators, and more buckets ----------------------------------------------------------------------------------


def test_memory_follows_the_allocator() -> None:
    groups = [mixed(0, 800), mixed(1, 1200), mixed(2, 400), mixed(3, 800), mixed(4, 800)]
    sizes = {slots: _gathered(groups, WeightAllocator.RESIZE, slots) - 1664 for slots in (1, 2, 3, 9)}
    assert sizes == {1: 2432, 2: 2432 + 896, 3: 2432 + 896 + 1664, 9: 2432 + 896 + 2 * 1664}
    groups = [mixed(0, 800), mixed(1, 400), mixed(2, 1200), mixed(3, 400), mixed(4, 800)]
    assert _gathered(groups, WeightAllocator.DOUBLE_BUFFER, 2) == 1664 + 2 * 896 + 2432
    assert _gathered(groups, WeightAllocator.PERSISTENT_DOUBLE_BUFFER, 2) == 1664 + 2 * 896 + 2432 + 1664
    assert _gathered(groups, WeightAllocator.MAX_POOL, 2) == 1664 + 2 * 2432


def _gathered(groups: list[GroupFootprint], allocator: WeightAllocator, slots: int) -> int:
    return transient_bytes(groups, OPTIM_GRADS_PARAMS, slots=slots, allocator=allocator).gathered


# ---- the outer axis --------------------------------------------------------------------------------------------------

GROUP = GroupFootprint(1, 96, 2, FP32, FP32, FP32, BF16, True, outer_ranks=3)


def test_what_crosses_the_outer_axis() -> None:
    part_bytes = 96 // 2 * 2  # bfloat16
    assert outer_step_traffic([GROUP], OPTIM_GRADS_PARAMS) == Traffic(0, 1, 0, 2 * (part_bytes - part_bytes // 3))
    shared = replace(GROUP, outer_shares=True)
    sent = 48 * 2 - 48 * 2 // 3
    assert outer_step_traffic([shared], OPTIM_GRADS_PARAMS) == Traffic(1, 1, 48 * 4 - 48 * 4 // 3, sent)
    alone, cut = persistent_bytes([GROUP], OPTIM_GRADS_PARAMS), persistent_bytes([shared], OPTIM_GRADS_PARAMS)
    assert (alone.compute_weight, cut.compute_weight) == (192, 192)
    assert (alone.main_grad, cut.main_grad) == (192, 64)
    assert (alone.optimizer, cut.optimizer) == (384, 128)
    whole = Traffic(0, 1, 0, 2 * (96 * 2 - 96 * 2 // 3))
    assert outer_step_traffic([GROUP], NO_SHARD) == whole
    assert outer_step_traffic([replace(GROUP, is_whole=True, outer_shares=True)], OPTIM_GRADS_PARAMS) == whole
    assert outer_step_traffic([replace(GROUP, outer_ranks=1)], OPTIM_GRADS_PARAMS) == Traffic(0, 0, 0, 0)
