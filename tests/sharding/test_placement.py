"""Placements of strategies, what each rank holds of a flat buffer, and the factors of a gradient reduction."""

import itertools
from dataclasses import replace
from typing import Literal, NamedTuple, cast

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.collectives import Axis, HostCommStream
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.config.precision import MixedPrecisionPolicy, ResolvedPrecision
from megatron_fsdp.engine.gradients import GradientBuffers
from megatron_fsdp.engine.plans import GroupPlan, ModelSharding, Sharding, plan_unit
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.placement import (
    GradientReduction,
    Placement,
    Region,
    gradient_reduction,
    held_region,
    placements_for,
    plan_layout,
    shard_count,
    strategies_of,
)
from megatron_fsdp.sharding.units import GroupKey, ParameterGroupSpec, ParameterInfo

R, S = Placement.REPLICATE, Placement.SHARD
NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS, *_MORE = ShardingStrategy


def test_what_cannot_be_sharded_over_the_outer_axis_is_refused() -> None:
    for outer in (OPTIM_GRADS, OPTIM_GRADS_PARAMS):
        with pytest.raises(ConfigurationError) as caught:
            placements_for(OPTIM_GRADS_PARAMS, outer)
        assert str(caught.value) == (
            f'outer_dp_sharding_strategy="{outer.name}" is not possible on the outer axis; '
            'give 0 or "no_shard", or 1 or "optim".'
        )
    with pytest.raises(ConfigurationError) as caught:
        placements_for(NO_SHARD, OPTIM)
    assert str(caught.value) == (
        'outer_dp_sharding_strategy="optim" shards further what zero_dp_strategy shards, which is nothing under '
        '"no_shard"; use "optim", "optim_grads" or "optim_grads_params" inside, or "no_shard" outside.'
    )


def test_placements_name_the_strategies_that_give_them() -> None:
    for inner in ShardingStrategy:
        for outer in (None, NO_SHARD, *([OPTIM] if inner.shards_main_weights else [])):
            assert strategies_of(placements_for(inner, outer)) == (inner, outer)
    whole = placements_for(NO_SHARD)
    assert strategies_of(replace(whole, compute_weight=(S,))) == (None, None)  # has no name


# ---- what each rank holds of a flat buffer ---------------------------------------------------------------------------


class At(NamedTuple):
    """A rank on an axis."""

    rank: int
    num_ranks: int


def test_a_buffer_is_cut_inner_first_by_the_axes_that_shard_it() -> None:
    held = {(o, i): held_region(12, [S, S], [At(o, 2), At(i, 3)]) for o in range(2) for i in range(3)}
    assert held == {(o, i): Region(4 * i + 2 * o, 4 * i + 2 * o + 2) for o in range(2) for i in range(3)}
    assert held_region(12, [R, S], [At(1, 2), At(2, 3)]) == Region(8, 12)
    assert held_region(12, [R, R], [At(1, 2), At(2, 3)]) == Region(0, 12)
    assert shard_count([R, S], [At(1, 2), At(2, 3)]) == 3
    assert shard_count([S, S], [At(1, 2), At(2, 3)]) == 6


@drawn(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_the_regions_of_all_ranks_tile_the_buffer_and_nest(inner: int, outer: int, length: int) -> None:
    numel = inner * outer * length
    cuts = []
    for i in range(inner):
        around = held_region(numel, [R, S], [At(0, outer), At(i, inner)])
        for o in range(outer):
            region = held_region(numel, [S, S], [At(o, outer), At(i, inner)])
            assert region.start == (i * outer + o) * length  # logical rank i * outer + o
            assert around.start <= region.start <= region.stop <= around.stop
            inside = region.within(around)
            assert (inside.start, inside.stop) == (o * length, (o + 1) * length)
            cuts.append(region)
    assert sum(region.numel for region in cuts) == numel
    assert all(first.stop == second.start for first, second in itertools.pairwise(cuts))


# ---- the factors of a reduction, against the value that is mathematically wanted -------------------------------------


def apply(reduction: GradientReduction, gradients: torch.Tensor) -> torch.Tensor:
    """Reduce (group, elements) gradients the way an engine would."""
    scaled = gradients * reduction.pre_factor
    reduced = scaled.sum(dim=0) if reduction.op == "sum" else scaled.mean(dim=0)
    return reduced * reduction.post_factor


@settings(deadline=None)
@drawn(
    dp_size=st.integers(1, 16),
    group_size=st.integers(1, 16),
    mode=st.sampled_from(["mean", "average in collective", "per token"]),
    comm_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_operation_and_factors_give_the_wanted_value(
    dp_size: int, group_size: int, mode: str, comm_dtype: torch.dtype, seed: int
) -> None:
    is_average, per_token = mode == "average in collective", mode == "per token"
    reduction = reduction_for(dp_size, group_size, is_average, comm_dtype, per_token)
    gradients = torch.randn(group_size, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted = gradients.sum(dim=0) / (1 if mode == "per token" else dp_size)
    torch.testing.assert_close(apply(reduction, gradients), wanted, rtol=1e-12, atol=1e-12)


def reduction_for(
    dp_size: int = 8, group_size: int = 8, average: bool = False, comm: torch.dtype = torch.float32, token: bool = False
) -> GradientReduction:
    return gradient_reduction(
        dp_size, group_size, average_in_collective=average, calculate_per_token_loss=token, comm_dtype=comm
    )


FP16 = torch.float16


def test_float16_is_scaled_before_the_sum_and_experts_are_divided_by_the_dense_size() -> None:
    for reduction, expected in (
        (reduction_for(), ("sum", 1.0, 0.125)),
        (reduction_for(comm=torch.bfloat16), ("sum", 1.0, 0.125)),
        (reduction_for(comm=FP16), ("sum", 0.125, 1.0)),
        (reduction_for(average=True), ("avg", 1.0, 1.0)),
        (reduction_for(average=True, comm=FP16), ("sum", 0.125, 1.0)),
        (reduction_for(8, 2, average=True, comm=FP16), ("sum", 0.125, 1.0)),
        (reduction_for(8, 2), ("sum", 1.0, 0.125)),
        (reduction_for(8, 2, average=True), ("avg", 1.0, 0.25)),
        (reduction_for(1, 1), ("sum", 1.0, 1.0)),
        (reduction_for(token=True), ("sum", 1.0, 1.0)),
        (reduction_for(token=True, comm=FP16), ("sum", 1.0, 1.0)),
    ):
        assert reduction == GradientReduction(*expected)
    gradients = torch.full((8, 1), 60000.0, dtype=FP16)
    assert gradients.sum(dim=0).isinf().all()  # what scaling afterwards would have met
    assert (gradients * reduction_for(comm=FP16).pre_factor).sum(dim=0).item() == 60000.0


@pytest.mark.parametrize(
    ("dp_size", "average", "token", "expected"),
    [
        (8, False, False, ("sum", 0.125, 1.0)),
        (6, False, False, ("sum", 1.0, 1 / 6)),  # which would round each summand
        (1, False, False, ("sum", 1.0, 1.0)),
        (8, True, False, ("avg", 1.0, 1.0)),
        (8, False, True, ("sum", 1.0, 1.0)),
    ],
)
def test_whole_gradients_are_scaled_before_the_sum_where_no_digit_is_lost(
    dp_size: int, average: bool, token: bool, expected: tuple[Literal["sum", "avg"], float, float]
) -> None:
    found = gradient_reduction(
        dp_size,
        dp_size,
        average_in_collective=average,
        calculate_per_token_loss=token,
        comm_dtype=torch.float32,
        is_whole=True,
    )
    assert found == GradientReduction(*expected)


def test_an_average_of_a_plain_sum_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        reduction_for(average=True, token=True)
    assert str(caught.value) == (
        "average_in_collective=True contradicts calculate_per_token_loss=True, which asks for a plain sum; "
        "set one of them to False."
    )


BF16, FP32 = torch.bfloat16, torch.float32
THIRD = 1 / 3


ALONE = RankMesh((Axis(None, 0, 1),), ("dp",), None, None, cast(DeviceMesh, None))  # nothing becomes a DTensor here


def test_a_parameter_with_a_factor_of_its_own_has_a_group_of_its_own() -> None:
    placements = placements_for(ShardingStrategy.optim_grads_params)
    dense = Sharding(EngineOptions(), ALONE, placements, torch.device("cpu"), divisor=1)
    sharding = ModelSharding(dense, apart={"bias": replace(dense, divisor=4)})
    plans = plan_unit(dict(torch.nn.Linear(2, 2).named_parameters()), [""], sharding, {})
    factors = {info.name: plan.reduction.post_factor for plan in plans for info in plan.spec.parameters}
    assert factors == {"weight": 1.0, "bias": 0.25}


@pytest.mark.parametrize(
    ("reduction", "main_grads", "grad_comm", "deferred"),
    [
        (GradientReduction("sum", 1.0, THIRD), FP32, BF16, False),
        (GradientReduction("sum", THIRD, 1.0), FP32, FP32, False),
        (GradientReduction("sum", 1.0, THIRD), FP32, BF16, True),
        (GradientReduction("sum", THIRD, 1.0), BF16, FP32, True),
    ],
)
def test_a_factor_is_applied_in_the_wider_dtype(
    reduction: GradientReduction, main_grads: torch.dtype, grad_comm: torch.dtype, deferred: bool
) -> None:
    """bfloat16 gradients, float32 on the wire or in the main gradient, and a factor that is no power of two."""
    precision = ResolvedPrecision(BF16, FP32, main_grads, grad_comm, has_main_copy=True)
    device = torch.device("cpu")
    key = GroupKey(BF16, requires_grad=True)
    layout = plan_layout([(100,)], 1)
    plan = GroupPlan(
        ParameterGroupSpec(key, (ParameterInfo("weight", (100,), key),)),
        layout,
        precision,
        reduction,
        placements_for(ShardingStrategy.no_shard),
        ALONE,
        device,
        (None,),
    )
    gradients = GradientBuffers(plan)
    grad = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(BF16)
    bucket = torch.empty(layout.numel, dtype=grad_comm)
    gradients.begin(None if deferred else bucket)
    gradients.add(0, grad)
    param = torch.nn.Parameter(torch.zeros(100))
    gradients.reduce(HostCommStream(), bucket, None, [param], HostCommStream())[0].wait()
    widest = bucket if grad_comm is FP32 else gradients.main.local
    assert torch.equal(widest[:100], grad.float() * THIRD)


class Scaled(torch.nn.Module):
    """A matrix and a scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))
        self.scalar = torch.nn.Parameter(torch.ones((), dtype=dtype))


@pytest.mark.parametrize(
    ("strategy", "dtype", "sent", "scales_first"),
    [
        (ShardingStrategy.no_shard, FP32, None, True),
        (ShardingStrategy.no_shard, FP32, BF16, True),
        (ShardingStrategy.no_shard, BF16, FP32, False),  # no single function of torch does it without rounding twice
        (ShardingStrategy.optim, FP32, None, False),  # one shard of the result is less to scale
        (ShardingStrategy.optim_grads_params, FP32, None, False),
    ],
)
def test_all_groups_of_a_sharding_are_scaled_at_one_time(
    strategy: ShardingStrategy, dtype: torch.dtype, sent: torch.dtype | None, scales_first: bool
) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None, grad_comm_dtype=sent)
    dense = Sharding(EngineOptions(policy=policy), ALONE, placements_for(strategy), torch.device("cpu"), divisor=4)
    plans = plan_unit(dict(Scaled(dtype).named_parameters()), [""], ModelSharding(dense), {})
    factors = {(plan.reduction.pre_factor, plan.reduction.post_factor) for plan in plans}
    assert (len(plans), factors) == (2, {(0.25, 1.0) if scales_first else (1.0, 0.25)})
