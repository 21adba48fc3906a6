"""Regions: what each rank holds of a flat buffer, over one and two axes."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import Placement, Region, held_region, shard_count

R, S = Placement.REPLICATE, Placement.SHARD


class At(NamedTuple):
    """A rank on an axis."""

    rank: int
    num_ranks: int


def test_a_buffer_sharded_over_two_axes_is_cut_inner_first() -> None:
    held = {(o, i): held_region(12, [S, S], [At(o, 2), At(i, 3)]) for o in range(2) for i in range(3)}
    assert held == {
        (0, 0): Region(0, 2),
        (1, 0): Region(2, 4),
        (0, 1): Region(4, 6),
        (1, 1): Region(6, 8),
        (0, 2): Region(8, 10),
        (1, 2): Region(10, 12),
    }


def test_a_replicated_axis_does_not_matter() -> None:
    assert held_region(12, [R, S], [At(1, 2), At(2, 3)]) == Region(8, 12)
    assert held_region(12, [R, R], [At(1, 2), At(2, 3)]) == Region(0, 12)
    assert shard_count([R, S], [At(1, 2), At(2, 3)]) == 3
    assert shard_count([S, S], [At(1, 2), At(2, 3)]) == 6


def test_a_buffer_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="10 elements cannot be cut into 3 equal parts"):
        held_region(10, [S], [At(0, 3)])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
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
