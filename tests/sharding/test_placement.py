"""Strategies by number and name, and the placement table."""

import pytest

from megatron_fsdp.config.strategy import ShardingStrategy, resolve_strategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import Placement, Placements, placements_for

R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD
NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS = ShardingStrategy


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        (0, NO_SHARD),
        (1, OPTIM),
        (2, OPTIM_GRADS),
        (3, OPTIM_GRADS_PARAMS),
        ("no_shard", NO_SHARD),
        ("optim", OPTIM),
        ("optim_grads", OPTIM_GRADS),
        ("optim_grads_params", OPTIM_GRADS_PARAMS),
        (ShardingStrategy.optim_grads, OPTIM_GRADS),
    ],
)
def test_numbers_names_and_members_resolve(given: int | str, strategy: ShardingStrategy) -> None:
    assert resolve_strategy(given) is strategy


@pytest.mark.parametrize("given", [4, -1, "3", "zero3", "mro", "", True, False, 1.0, None])
def test_anything_else_is_refused_and_both_spellings_are_listed(given: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_strategy(given, "outer_dp_sharding_strategy")  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"outer_dp_sharding_strategy={given!r} is not a sharding strategy; give one of "
        '0 or "no_shard", 1 or "optim", 2 or "optim_grads", 3 or "optim_grads_params".'
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (NO_SHARD, Placements(compute_weight=(R,), accumulated_grad=(P,), main_grad=(R,), main_weight=(R,))),
        (OPTIM, Placements(compute_weight=(R,), accumulated_grad=(P,), main_grad=(S,), main_weight=(S,))),
        (OPTIM_GRADS, Placements(compute_weight=(R,), accumulated_grad=(S,), main_grad=(S,), main_weight=(S,))),
        (OPTIM_GRADS_PARAMS, Placements(compute_weight=(S,), accumulated_grad=(S,), main_grad=(S,), main_weight=(S,))),
    ],
)
def test_each_step_up_shards_one_buffer_more(strategy: ShardingStrategy, expected: Placements) -> None:
    assert placements_for(strategy) == expected


def test_hsdp_replicates_over_the_outer_axis_and_defers_its_reduction() -> None:
    assert placements_for(OPTIM_GRADS_PARAMS, NO_SHARD) == Placements(
        compute_weight=(R, S), accumulated_grad=(P, S), main_grad=(R, S), main_weight=(R, S)
    )


def test_hfsdp_shards_main_weights_over_both_axes() -> None:
    assert placements_for(OPTIM_GRADS_PARAMS, OPTIM) == Placements(
        compute_weight=(R, S), accumulated_grad=(P, S), main_grad=(S, S), main_weight=(S, S)
    )


def test_an_outer_replica_of_plain_data_parallelism_is_replicated_everywhere() -> None:
    assert placements_for(NO_SHARD, NO_SHARD) == Placements(
        compute_weight=(R, R), accumulated_grad=(P, P), main_grad=(R, R), main_weight=(R, R)
    )


@pytest.mark.parametrize("outer", [OPTIM_GRADS, OPTIM_GRADS_PARAMS])
def test_gradients_and_weights_cannot_be_sharded_over_the_outer_axis(outer: ShardingStrategy) -> None:
    with pytest.raises(ConfigurationError) as caught:
        placements_for(OPTIM_GRADS_PARAMS, outer)
    assert str(caught.value) == (
        f'outer_dp_sharding_strategy="{outer.name}" is not possible on the outer axis; '
        'give 0 or "no_shard", or 1 or "optim".'
    )


@pytest.mark.parametrize("inner", [OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS])
def test_an_outer_optimizer_shard_cuts_main_weights_and_gradients_further(inner: ShardingStrategy) -> None:
    alone, both = placements_for(inner), placements_for(inner, OPTIM)
    assert both.main_weight == (S, *alone.main_weight)
    assert both.main_grad == (S, *alone.main_grad)
    assert both.accumulated_grad == (P, *alone.accumulated_grad)
    assert both.compute_weight == (R, *alone.compute_weight)


def test_an_outer_optimizer_shard_needs_something_sharded_inside() -> None:
    with pytest.raises(ConfigurationError) as caught:
        placements_for(NO_SHARD, OPTIM)
    assert str(caught.value) == (
        'outer_dp_sharding_strategy="optim" shards further what zero_dp_strategy shards, which is nothing under '
        '"no_shard"; use "optim", "optim_grads" or "optim_grads_params" inside, or "no_shard" outside.'
    )
