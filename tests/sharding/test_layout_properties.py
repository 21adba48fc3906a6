"""Layouts: what holds for every input, checked on generated ones."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_fsdp.sharding.layout import Granularity, GranularityKind, Layout, plan_layout

Problem = dict[str, Any]  # keyword arguments of plan_layout

dims = st.one_of(st.integers(0, 4), st.integers(1, 40))
shapes_lists = st.lists(st.lists(dims, max_size=3).map(tuple), max_size=10)
shard_counts = st.integers(1, 17)
alignments = st.sampled_from([1, 2, 4, 8, 12])
granularities = st.one_of(
    st.sampled_from([Granularity.ROWS, Granularity.TENSOR, Granularity.ELEMENTS]),
    st.integers(1, 9).map(Granularity.blocks),
)


@st.composite
def problems(draw: st.DrawFn, kinds: st.SearchStrategy[Granularity] = granularities) -> Problem:
    """Arguments of plan_layout with one granularity per tensor."""
    shapes = draw(shapes_lists)
    granularity = draw(st.lists(kinds, min_size=len(shapes), max_size=len(shapes)))
    options = {"alignment_numel": draw(alignments), "granularity": granularity}
    return {
        "shapes": shapes,
        "num_shards": draw(shard_counts),
        **options,
        "max_waste": draw(st.sampled_from([0, 0.01, 1])),
    }


def inner_edges(layout: Layout, index: int) -> list[int]:
    """Positions inside a tensor, from its start, where a shard edge cuts it."""
    start, stop = layout.tensor_range(index)
    edges = (rank * layout.shard_numel for rank in range(1, layout.num_shards))
    return [edge - start for edge in edges if start < edge < stop]


def checked(test: Callable[..., None]) -> Callable[..., None]:
    """Without a time limit per example, which a busy machine would break."""
    return settings(deadline=None, max_examples=100)(test)


@checked
@given(problems())
def test_every_element_is_owned_by_exactly_one_rank(problem: Problem) -> None:
    layout = plan_layout(**problem)
    for index in range(len(layout.shapes)):
        ranges = [layout.local_range(index, rank) for rank in range(layout.num_shards)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == layout.tensor_numel(index)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert all(0 <= stop - start <= layout.shard_numel for start, stop in ranges)


@checked
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


@checked
@given(problems())
def test_edges_cut_between_granules_only(problem: Problem) -> None:
    layout = plan_layout(**problem)
    for index, granularity in enumerate(problem["granularity"]):
        wanted = granularity.granule_numel(layout.shapes[index])
        kept = layout.granules[index] == wanted
        assert kept or (granularity.kind is GranularityKind.ROWS and layout.granules[index] == 1)
        assert all(edge % layout.granules[index] == 0 for edge in inner_edges(layout, index))


@checked
@given(problems())
def test_tensors_and_shards_start_aligned(problem: Problem) -> None:
    layout = plan_layout(**problem)
    alignment_numel = problem["alignment_numel"]
    assert layout.shard_numel % alignment_numel == 0
    assert all(offset % alignment_numel == 0 for offset in layout.offsets)


@checked
@given(problems(st.just(Granularity.TENSOR)))
def test_a_whole_tensor_lies_on_a_single_rank(problem: Problem) -> None:
    layout = plan_layout(**problem)
    assert all(inner_edges(layout, index) == [] for index in range(len(layout.shapes)))
    # Largest first into the tightest room never needs more than twice the larger of the two lower bounds.
    lengths = [-(-math.prod(shape) // problem["alignment_numel"]) for shape in problem["shapes"]]
    fair = max([-(-sum(lengths) // layout.num_shards), *lengths])
    assert layout.shard_numel <= 2 * fair * problem["alignment_numel"]


@checked
@given(problems(st.sampled_from([Granularity.ROWS, Granularity.ELEMENTS])))
@example({"shapes": [(1,)], "num_shards": 8, "alignment_numel": 4, "granularity": Granularity.ROWS, "max_waste": 0})
def test_padding_stays_within_the_bound(problem: Problem) -> None:
    layout = plan_layout(**problem)
    count = sum(math.prod(shape) > 0 for shape in layout.shapes)
    alignment_numel = problem["alignment_numel"]
    unavoidable = count * (alignment_numel - 1) + (layout.num_shards - 1) * alignment_numel
    assert layout.padding_numel <= max(problem["max_waste"] * layout.payload_numel, unavoidable)


@settings(deadline=None, max_examples=60)
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


@checked
@given(problems())
def test_the_same_input_gives_the_same_layout(problem: Problem) -> None:
    assert plan_layout(**problem) == plan_layout(**problem)


@checked
@given(problems())
def test_local_shapes_hold_exactly_the_local_elements(problem: Problem) -> None:
    layout = plan_layout(**problem)
    for index, shape in enumerate(layout.shapes):
        local_shapes = [layout.local_shape(index, rank) for rank in range(layout.num_shards)]
        for rank, local_shape in enumerate(local_shapes):
            start, stop = layout.local_range(index, rank)
            assert math.prod(local_shape) == stop - start
        row_numel = math.prod(shape[1:])
        whole_rows = bool(shape) and row_numel > 0 and all(edge % row_numel == 0 for edge in inner_edges(layout, index))
        assert layout.is_row_sharded(index) == whole_rows
        if whole_rows:
            assert all(local_shape[1:] == shape[1:] for local_shape in local_shapes)
            assert sum(local_shape[0] for local_shape in local_shapes) == shape[0]
        else:
            assert all(len(local_shape) == 1 for local_shape in local_shapes)


@checked
@given(problems(st.sampled_from([Granularity.ROWS, Granularity.ELEMENTS])))
def test_no_waste_allowed_gives_the_tightest_buffer(problem: Problem) -> None:
    layout = plan_layout(**{**problem, "max_waste": 0})
    alignment_numel, num_shards = problem["alignment_numel"], problem["num_shards"]
    units = sum(-(-math.prod(shape) // alignment_numel) for shape in problem["shapes"])
    assert layout.shard_numel == -(-units // num_shards) * alignment_numel
