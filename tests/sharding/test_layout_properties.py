"""Layouts: what holds for every input, checked on generated ones."""

import itertools
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp.sharding.layout import Layout, plan_layout

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
        ranges = [layout.local_range(index, rank) for rank in range(layout.num_shards)]
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
            start, stop = layout.local_range(index, rank)
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
        ranges = [layout.local_range(index, rank) for rank in range(layout.num_shards)]
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
