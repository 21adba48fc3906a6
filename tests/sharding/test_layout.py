"""Layouts: hand-checked placements, queries on odd tensors, and what holds for every input."""

import itertools
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.sharding.placement import Layout, Region, plan_layout

WHOLE_ROWS = 1e6
"""A waste that is always worth whole rows."""


def held(layout: Layout, index: int, rank: int) -> tuple[int, int]:
    """The range of a tensor's flattened elements that a rank holds."""
    first = rank * layout.shard_numel
    return layout.range_in(index, Region(first, first + layout.shard_numel))


def local_shape(layout: Layout, index: int, rank: int) -> tuple[int, ...]:
    """The shape of a rank's shard of a tensor."""
    start, stop = held(layout, index, rank)
    return layout.shard_shape(index, stop - start)


def test_small_layouts_worked_out_by_hand() -> None:
    # 35 elements on 2 ranks. 18 per rank is impossible; with 19 the edge falls 16 elements, or 4 rows, into (5, 4).
    layout = plan_layout([(5, 4), (2, 6), (3,)], 2, max_waste=WHOLE_ROWS)
    assert layout == Layout(((5, 4), (2, 6), (3,)), (3, 23, 0), num_shards=2, shard_numel=19)
    assert layout.padding_numel == 3
    assert layout.padding_fraction == 3 / 35
    layout = plan_layout([(4, 4), (8, 2), (16,)], 3)
    assert layout.offsets == (0, 16, 32)
    assert layout.shard_numel == 16
    layout = plan_layout([(3, 5), (7,), (2, 2)], 1, alignment_numel=4)
    assert layout.offsets == (0, 16, 24)
    assert layout.shard_numel == 28
    # 9 rows of 10 on 4 ranks: 23 would hold it, but several edges inside need a multiple of 10.
    layout = plan_layout([(9, 10)], 4, max_waste=WHOLE_ROWS)
    assert layout.shard_numel == 30
    assert [local_shape(layout, 0, rank) for rank in range(4)] == [(3, 10), (3, 10), (3, 10), (0, 10)]
    # Each tensor crosses one edge: the first after 3 rows, the second after 2. Rows of 5 need not divide 21.
    layout = plan_layout([(4, 7), (6, 5)], 3, max_waste=WHOLE_ROWS)
    assert layout.offsets == (0, 32)
    assert layout.shard_numel == 21


def test_rows_are_given_up_where_they_would_waste_too_much() -> None:
    shapes = [(3, 1000), (64,)]
    assert plan_layout(shapes, 8, max_waste=WHOLE_ROWS).shard_numel == 1000
    loose = plan_layout(shapes, 8)
    assert loose.shard_numel == 383
    assert local_shape(loose, 0, 0) == (383,)
    assert not loose.is_row_sharded(0)
    # 100 rows on 3 ranks: 34 rows each, 2 % more than needed.
    assert plan_layout([(100, 10)], 3, max_waste=0.02).is_row_sharded(0)
    assert not plan_layout([(100, 10)], 3, max_waste=0.019).is_row_sharded(0)
    block = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2
    layout = plan_layout(block, 256, alignment_numel=8)
    assert [index for index in range(9) if not layout.is_row_sharded(index)] == [6]
    assert layout.padding_fraction < 0.0052
    shapes = [(192, 224)] * 4 + [(224, 192), (224, 224), (192, 192), (192, 192)]
    layout = plan_layout(shapes, 16, alignment_numel=4)
    assert [index for index in range(8) if layout.is_row_sharded(index)] == [4, 6, 7]


def test_rows_that_begin_at_aligned_elements_only() -> None:
    # Rows of 6 with alignment 4: only every second row begins at a multiple of 4.
    layout = plan_layout([(8, 6)], 4, alignment_numel=4, max_waste=WHOLE_ROWS)
    assert layout.shard_numel == 12
    assert [local_shape(layout, 0, rank) for rank in range(4)] == [(2, 6)] * 4


def test_scalars_single_elements_and_empty_tensors() -> None:
    layout = plan_layout([(1,)], 8, alignment_numel=4)
    assert layout.shard_numel == 4
    assert [local_shape(layout, 0, rank) for rank in range(8)] == [(1,)] + [(0,)] * 7
    layout = plan_layout([()], 2)
    assert [local_shape(layout, 0, rank) for rank in range(2)] == [(1,), (0,)]
    assert not layout.is_row_sharded(0)
    layout = plan_layout([(0, 5), (4,), (5, 0)], 2, alignment_numel=2)
    assert layout.numel == 4
    assert layout.padding_numel == 0
    assert local_shape(layout, 0, 1) == (0, 5)
    assert local_shape(layout, 2, 0) == (0,)


def test_row_sharding_is_where_edges_fall_the_same_on_all_ranks() -> None:
    layout = plan_layout([(4, 6)], 2, max_waste=0)
    assert layout.is_row_sharded(0)
    assert local_shape(layout, 0, 1) == (2, 6)
    # The edge cuts the second row: rank 0 holds a whole row and a half, rank 1 a half and a whole one.
    layout = plan_layout([(3, 4)], 2, max_waste=0)
    assert [local_shape(layout, 0, rank) for rank in range(2)] == [(6,), (6,)]
    layout = Layout(((2, 3), (4,)), (4, 0), num_shards=2, shard_numel=7)
    assert layout.tensor_range(0) == (4, 10)
    assert [held(layout, 0, rank) for rank in range(2)] == [(0, 3), (3, 6)]
    assert [held(layout, 1, rank) for rank in range(2)] == [(0, 4), (4, 4)]
    assert (layout.tensor_numel(0), layout.payload_numel, layout.padding_numel) == (6, 10, 4)


# ---- what holds for every input, checked on generated ones -----------------------------------------------------------


Problem = dict[str, Any]  # keyword arguments of plan_layout

dims = st.one_of(st.integers(0, 4), st.integers(1, 40))
shapes_lists = st.lists(st.lists(dims, max_size=3).map(tuple), max_size=10)
shard_counts = st.integers(1, 17)
alignments = st.sampled_from([1, 2, 4, 8, 12])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Arguments of plan_layout."""
    return {
        "shapes": draw(shapes_lists),
        "num_shards": draw(shard_counts),
        "alignment_numel": draw(alignments),
        "max_waste": draw(st.sampled_from([0, 0.01, 1, 1e6])),
    }


def inner_edges(layout: Layout, index: int) -> list[int]:
    """Positions inside a tensor, from its start, where a shard edge cuts it."""
    start, stop = layout.tensor_range(index)
    edges = (rank * layout.shard_numel for rank in range(1, layout.num_shards))
    return [edge - start for edge in edges if start < edge < stop]


@given(problems())
def test_every_element_is_owned_by_exactly_one_rank(problem: Problem) -> None:
    layout = plan_layout(**problem)
    for index in range(len(layout.shapes)):
        ranges = [held(layout, index, rank) for rank in range(layout.num_shards)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == layout.tensor_numel(index)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert all(0 <= stop - start <= layout.shard_numel for start, stop in ranges)


@given(problems())
def test_tensors_survive_the_way_through_shards_and_back(problem: Problem) -> None:
    layout = plan_layout(**problem)
    numels = [layout.tensor_numel(index) for index in range(len(layout.shapes))]
    tensors = [torch.arange(numel) + 1000 * index for index, numel in enumerate(numels)]
    shards = [torch.full((layout.shard_numel,), -1) for _ in range(layout.num_shards)]
    for rank, shard in enumerate(shards):
        for index, tensor in enumerate(tensors):
            start, stop = held(layout, index, rank)
            if start < stop:
                at = layout.offsets[index] + start - rank * layout.shard_numel
                shard[at : at + stop - start] = tensor[start:stop]
    buffer = torch.cat(shards)
    for index, tensor in enumerate(tensors):
        assert torch.equal(buffer[slice(*layout.tensor_range(index))], tensor)
    assert int((buffer == -1).sum()) == layout.padding_numel


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=40),
    st.integers(1, 65536),
    alignments,
)
def test_padding_stays_within_the_bound_on_many_ranks(
    shapes: list[tuple[int, ...]], num_shards: int, alignment_numel: int
) -> None:
    layout = plan_layout(shapes, num_shards, alignment_numel=alignment_numel)
    unavoidable = len(shapes) * (alignment_numel - 1) + (num_shards - 1) * alignment_numel
    assert layout.padding_numel <= max(0.01 * layout.payload_numel, unavoidable)


@given(problems())
def test_local_shapes_hold_exactly_the_local_elements(problem: Problem) -> None:
    layout = plan_layout(**problem)
    for index, shape in enumerate(layout.shapes):
        ranges = [held(layout, index, rank) for rank in range(layout.num_shards)]
        local_shapes = [layout.shard_shape(index, stop - start) for start, stop in ranges]
        for (start, stop), local_shape in zip(ranges, local_shapes, strict=True):
            assert math.prod(local_shape) == stop - start
        row_numel = math.prod(shape[1:])
        whole_rows = bool(shape) and row_numel > 0 and all(edge % row_numel == 0 for edge in inner_edges(layout, index))
        assert layout.is_row_sharded(index) == whole_rows
        if whole_rows:
            assert all(local_shape[1:] == shape[1:] for local_shape in local_shapes)
            assert sum(local_shape[0] for local_shape in local_shapes) == shape[0]
        else:
            assert all(len(local_shape) == 1 for local_shape in local_shapes)


# ---- the whole buffer is a multiple of a number (1: of none) ---------------------------------------------------------

NCCL_MULTIPLE = 2**16

multiples = st.one_of(st.sampled_from([1, 2, 3, 12, 64, 1000, NCCL_MULTIPLE]), st.integers(1, 300))


@given(problems(), multiples)
def test_the_buffer_is_a_multiple_and_everything_is_aligned(problem: Problem, numel_multiple: int) -> None:
    layout = plan_layout(**problem, numel_multiple=numel_multiple)
    alignment_numel = problem["alignment_numel"]
    assert layout.numel % numel_multiple == 0
    assert all(start % alignment_numel == 0 for start in (layout.shard_numel, *layout.offsets))


@given(problems(), multiples)
def test_rows_stay_whole_where_any_waste_is_allowed(problem: Problem, numel_multiple: int) -> None:
    layout = plan_layout(**{**problem, "max_waste": 1e6}, numel_multiple=numel_multiple)
    for index, shape in enumerate(layout.shapes):
        assert layout.is_row_sharded(index) == (bool(shape) and math.prod(shape[1:]) > 0)


def whole_rows(layout: Layout) -> list[int]:
    return [index for index in range(len(layout.shapes)) if layout.is_row_sharded(index)]


def test_huge_rows_are_cut_where_whole_ones_would_cost_too_much() -> None:
    shapes = [(3, 100_000), (64,)]
    layout = plan_layout(shapes, 7, numel_multiple=NCCL_MULTIPLE)
    assert whole_rows(layout) == [1]
    assert layout.numel == 7 * NCCL_MULTIPLE  # 300,064 elements: one multiple in each shard, since 7 is odd
    strict = plan_layout(shapes, 7, max_waste=1e6, numel_multiple=NCCL_MULTIPLE)
    assert strict.numel == 28 * NCCL_MULTIPLE  # with two or three in each, a second edge would cut a row
    assert strict.is_row_sharded(0)
