"""Strategies by number and name, and the placement table."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from megatron_fsdp.config.strategy import ShardingStrategy, resolve_strategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import Placement, Placements, Region, held_region, placements_for, shard_count

R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD
NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS = ShardingStrategy


def test_numbers_names_and_members_resolve() -> None:
    for number, name in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params")):
        strategy = ShardingStrategy[name]
        assert {resolve_strategy(given) for given in (number, name, strategy)} == {strategy}


@pytest.mark.parametrize("given", [4, "3", "mro", True, 1.0, None])
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


def test_an_outer_axis_replicates_or_shards_main_weights() -> None:
    assert placements_for(OPTIM_GRADS_PARAMS, NO_SHARD) == Placements(
        compute_weight=(R, S), accumulated_grad=(P, S), main_grad=(R, S), main_weight=(R, S)
    )
    assert placements_for(OPTIM_GRADS_PARAMS, OPTIM) == Placements(
        compute_weight=(R, S), accumulated_grad=(P, S), main_grad=(S, S), main_weight=(S, S)
    )
    assert placements_for(NO_SHARD, NO_SHARD) == Placements(
        compute_weight=(R, R), accumulated_grad=(P, P), main_grad=(R, R), main_weight=(R, R)
    )


@pytest.mark.parametrize("inner", [OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS])
def test_an_outer_optimizer_shard_cuts_main_weights_and_gradients_further(inner: ShardingStrategy) -> None:
    alone, both = placements_for(inner), placements_for(inner, OPTIM)
    assert both.main_weight == (S, *alone.main_weight)
    assert both.main_grad == (S, *alone.main_grad)
    assert both.accumulated_grad == (P, *alone.accumulated_grad)
    assert both.compute_weight == (R, *alone.compute_weight)


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


# ---- what each rank holds of a flat buffer ---------------------------------------------------------------------------


class At(NamedTuple):
    """A rank on an axis."""

    rank: int
    num_ranks: int


def test_a_buffer_is_cut_inner_first_by_the_axes_that_shard_it() -> None:
    held = {(o, i): held_region(12, [S, S], [At(o, 2), At(i, 3)]) for o in range(2) for i in range(3)}
    assert held == {
        (0, 0): Region(0, 2),
        (1, 0): Region(2, 4),
        (0, 1): Region(4, 6),
        (1, 1): Region(6, 8),
        (0, 2): Region(8, 10),
        (1, 2): Region(10, 12),
    }
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
