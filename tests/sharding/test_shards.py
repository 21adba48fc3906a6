"""Who holds what: the chunks of all ranks tile the global tensor, also after a split; contradictions are refused."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import plan_layout
from megatron_fsdp.sharding.shards import (
    BufferCut,
    ListedCut,
    MeshUse,
    ShardDescription,
    TensorParallelCut,
    boxes_of_range,
    described_as_whole,
    elements_before,
    narrow_description,
    split_lengths,
    split_ranges,
)
from tests.sharding.test_layout import held


@st.composite
def descriptions(draw: st.DrawFn) -> list[ShardDescription]:
    """One description per place of a mesh of one of the kinds that sharding uses."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    inner, outer, tensor = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes, shard_dims = draw(
        st.sampled_from([((inner,), (0,)), ((outer, inner), (1,)), ((outer, inner), (1, 0)), ((inner,), ())])
    )
    tensor_dim, tensor_cut = None, None
    if draw(st.booleans()):
        tensor_dim, sizes = len(sizes), (*sizes, tensor)
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            tensor_cut = TensorParallelCut.by_chunk(shape[dim], tensor, dim)
    use = MeshUse(sizes, shard_dims, tensor_dim)
    cuts = []
    for part in range(use.num_parts):
        part_shape = list(shape)
        if tensor_cut is not None:
            part_shape[tensor_cut.dim] = tensor_cut.edges[part + 1] - tensor_cut.edges[part]
        numel = math.prod(part_shape)
        count = use.num_shards - 1
        edges = sorted(draw(st.lists(st.integers(0, numel), min_size=count, max_size=count)))
        cuts.append(ListedCut((0, *edges, numel)))
    places = itertools.product(*(range(size) for size in sizes))
    return [ShardDescription(shape, use, at, cuts[use.part_at(at)], tensor_cut, tuple(cuts)) for at in places]


def holders(here: ShardDescription) -> torch.Tensor:
    """How many distinct (shard, part) pairs hold each element."""
    count = torch.zeros(here.shape, dtype=torch.int64)
    parts = here.use.num_parts if here.tensor_cut is not None else 1
    for part, shard in itertools.product(range(parts), range(here.num_shards)):
        boxes = here.boxes(shard, part)
        assert len(boxes) <= 2 * len(here.shape) - 1
        for box in boxes:
            count[box.indices] += 1
    return count


@given(descriptions())
def test_chunks_of_all_ranks_tile_the_tensor_seen_from_any_rank(everyone: list[ShardDescription]) -> None:
    for here in everyone:
        assert torch.equal(holders(here), torch.ones(here.shape, dtype=torch.int64))


@given(descriptions())
def test_every_rank_is_right_about_every_other(everyone: list[ShardDescription]) -> None:
    for here, other in itertools.product(everyone, everyone):
        at = other.coordinate
        assert here.boxes(here.use.shard_at(at), here.use.part_at(at)) == other.boxes()
    for here in everyone:
        assert sum(box.numel for box in here.boxes()) == math.prod(here.local_shape)
        assert here.cut.largest_numel >= math.prod(here.local_shape)


@given(descriptions(), st.data())
def test_what_a_split_leaves_to_a_rank_is_what_it_had(everyone: list[ShardDescription], data: st.DataObject) -> None:
    shape = everyone[0].shape
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    stop = data.draw(st.integers(start, shape[dim]))
    whole = torch.arange(math.prod(shape)).view(shape)
    piece = whole.narrow(dim, start, stop - start)
    for here in everyone:
        new = narrow_description(here, dim, start, stop)
        assert new.shape == tuple(piece.shape)
        kept = set(piece.reshape(-1).tolist())
        assert _elements(piece, new) == [element for element in _elements(whole, here) if element in kept]


def _elements(whole: torch.Tensor, here: ShardDescription) -> list[int]:
    found: list[int] = []
    for box in here.boxes():
        found += whole[box.indices].flatten().tolist()
    return found


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([0, 1e6]),
)
def test_a_cut_read_off_a_layout_agrees_with_the_layout(
    shapes: list[tuple[int, ...]], num_shards: int, max_waste: float
) -> None:
    layout = plan_layout(shapes, num_shards, max_waste=max_waste)
    for index, shape in enumerate(layout.shapes):
        cut = BufferCut(layout.offsets[index], layout.shard_numel, num_shards, layout.tensor_numel(index))
        for rank in range(num_shards):
            here = ShardDescription(shape, MeshUse((num_shards,), (0,)), (rank,), cut)
            start, stop = held(layout, index, rank)
            assert here.local_range == (start, stop)
            if num_shards > 1:
                assert here.local_shape == layout.shard_shape(index, stop - start)
            listed = ListedCut((0, *(cut.range_of(shard)[1] for shard in range(num_shards))))
            assert cut.largest_numel >= listed.largest_numel
            assert all(listed.is_multiple_of(step) == cut.is_multiple_of(step) for step in (1, 2, 3, 6))


def test_shards_of_several_axes() -> None:
    use = MeshUse((3, 2), shard_dims=(1, 0))
    assert [use.shard_at((outer, inner)) for inner in range(2) for outer in range(3)] == [0, 1, 2, 3, 4, 5]
    assert TensorParallelCut.by_chunk(5, 4, 0).edges == (0, 2, 4, 5, 5)
    here = described_as_whole((2, 3), (2, 2), (1, 0))
    assert here.is_whole
    assert here.spread_dims == ()
    assert [(box.offsets, box.lengths) for box in here.boxes()] == [((0, 0), (2, 3))]


def test_split_lengths_are_those_of_torch_and_elements_are_counted_in_flattened_order() -> None:
    for length, size in [(7, 3), (6, 3), (3, 1), (2, 5), (0, 2), (0, 0)]:
        wanted = [len(piece) for piece in torch.arange(length).split(size)]
        assert list(split_lengths(length, size)) == wanted
    assert split_ranges(5, [2, 0, 3]) == ((0, 2), (2, 2), (2, 5))
    kept = torch.zeros(3, 4, 2, dtype=torch.int64)
    kept[:, 1:3] = 1
    for position in range(25):
        assert elements_before(position, (3, 4, 2), 1, (1, 3)) == int(kept.flatten()[:position].sum())


@pytest.mark.parametrize("lengths", [[2, 3], -1])
def test_lengths_that_contradict_the_tensor_are_refused(lengths: int | list[int]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be split"):
        split_lengths(4, lengths)


def test_uneven_parts_have_to_be_described_to_be_asked_about() -> None:
    use, tensor_cut = MeshUse((2,), (), 0), TensorParallelCut.by_chunk(3, 2, 0)
    here = ShardDescription((3,), use, (0,), ListedCut((0, 2)), tensor_cut)
    with pytest.raises(ConfigurationError, match="other_cuts"):
        here.boxes(0, 1)


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(ranges())
def test_boxes_cover_the_range_once_and_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(boxes_of_range(shape, start, stop)) <= max(1, 2 * len(shape) - 1)
    positions = torch.arange(torch.Size(shape).numel()).view(shape)
    covered = []
    for box in boxes_of_range(shape, start, stop):
        region = positions[box.indices]
        assert region.numel() == box.numel
        covered += region.flatten().tolist()
    assert covered == list(range(start, stop))
