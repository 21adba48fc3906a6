import torch

from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.describe.model import MemoryUse
from megatron_fsdp.sharding.accounting import GroupFootprint
from megatron_fsdp.train.reporting.comparison import Measurement, Plan, Row, compare
from megatron_fsdp.train.reporting.readings import optimizer_bytes


def group(unit: int, numel: int, *, outer_ranks: int = 1, outer_shares: bool = False) -> GroupFootprint:
    return GroupFootprint(
        outer_ranks=outer_ranks,
        outer_shares=outer_shares,
        unit=unit,
        numel=numel,
        num_shards=2,
        compute=torch.bfloat16,
        main_params=torch.float32,
        main_grads=torch.float32,
        grad_comm=torch.bfloat16,
        requires_grad=True,
    )


def formulas(
    strategy: ShardingStrategy,
    *,
    microbatches: int = 1,
    exchanges_pairwise: bool = False,
    outer_ranks: int = 1,
    outer_shares: bool = False,
) -> list[int]:
    sizes = (100, 400, 400, 400)
    groups = tuple(
        group(unit, numel, outer_ranks=outer_ranks, outer_shares=outer_shares) for unit, numel in enumerate(sizes)
    )
    measured = Measurement(MemoryUse(1, 0, 0, 2, 0), 3, Traffic(4, 5, 6, 7))
    rows = compare(measured, Plan(groups, strategy, microbatches, exchanges_pairwise))
    assert [row.measured for row in rows] == [1, 3, 2, 4, 6, 5, 7]
    return [row.formula for row in rows]


def test_fully_sharded_formulas_are_worked_out_by_hand() -> None:
    assert formulas(ShardingStrategy.optim_grads_params) == [
        650 * (2 + 4 + 4),  # a bf16 weight, a float32 main weight and a float32 gradient per owned element
        650 * 8,
        2 * (256 + 2 * 896),  # the root and two units, gathered; a bucket for the root and two for units; blocks of 128
        5,  # root and three units, and the unit that gave way to the last two again in backward
        (50 + 4 * 200) * 2,
        4,
        650 * 2,
    ]


def test_pairwise_exchange_takes_one_more_bucket() -> None:
    plain = formulas(ShardingStrategy.optim_grads_params)
    pairwise = formulas(ShardingStrategy.optim_grads_params, exchanges_pairwise=True)
    assert [after - before for before, after in zip(plain, pairwise, strict=True)] == [0, 0, 896, 0, 0, 0, 0]


def test_each_microbatch_reduces_again() -> None:
    assert formulas(ShardingStrategy.optim_grads, microbatches=3)[5:] == [12, 3 * 1300]


def test_where_gradients_are_not_sharded_microbatches_are_reduced_together() -> None:
    once, thrice = (formulas(ShardingStrategy.optim, microbatches=number) for number in (1, 3))
    assert once == thrice
    assert once[5:] == [4, 1300]


def test_the_outer_axis_is_counted_too() -> None:
    inside = formulas(ShardingStrategy.optim_grads, microbatches=3)
    hybrid = formulas(ShardingStrategy.optim_grads, microbatches=3, outer_ranks=2)
    part = 650 * 2  # bytes of the bfloat16 weights, or gradients, that an inner rank stands for
    assert hybrid[3:5] == inside[3:5]
    assert hybrid[5:] == [24, 3 * (1300 + 2 * part // 2)]  # an all-reduce of each group after each microbatch
    shared = formulas(ShardingStrategy.optim_grads, microbatches=3, outer_ranks=2, outer_shares=True)
    assert shared[3:5] == [inside[3] + 4, inside[4] + part // 2]
    assert shared[5:] == [24, 3 * (1300 + part // 2)]


def test_ratio_is_measured_over_formula() -> None:
    assert Row("x", "bytes", 3, 2).ratio == 1.5
    assert Row("x", "count", 0, 0).ratio == 1.0
    assert Row("x", "count", 1, 0).ratio == float("inf")


def test_counters_subtract() -> None:
    assert Traffic(5, 7, 9, 11).since(Traffic(1, 2, 3, 4)) == Traffic(4, 5, 6, 7)


def test_optimizer_bytes_count_adam_twice_and_no_step_counters() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 5))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3, 5)
    optimizer.step()
    assert optimizer_bytes(optimizer) == 2 * 15 * 4
