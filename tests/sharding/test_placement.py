"""Strategies by number and name, and what each rank holds of a flat buffer."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from megatron_fsdp.config.ddp_config import ShardingStrategy, resolve_strategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import Placement, Region, held_region, placements_for, shard_count

R, S = Placement.REPLICATE, Placement.SHARD
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
