"""A flat range of a tensor as boxes: every element covered once, in order."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from megatron_fsdp.sharding.shards import Box, boxes_of_range

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
    positions = torch.arange(torch.Size(shape).numel()).view(shape)
    covered = []
    for box in boxes_of_range(shape, start, stop):
        region = positions[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
        assert region.numel() == box.numel
        covered += region.flatten().tolist()
    assert covered == list(range(start, stop))


@given(ranges())
def test_there_are_at_most_two_boxes_per_dimension_less_one(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(boxes_of_range(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


def test_head_body_and_tail_of_a_matrix() -> None:
    assert boxes_of_range((5, 3), 2, 13) == (Box((0, 2), (1, 1)), Box((1, 0), (3, 3)), Box((4, 0), (1, 1)))


def test_whole_rows_are_one_box_and_nothing_is_none() -> None:
    assert boxes_of_range((5, 3), 3, 12) == (Box((1, 0), (3, 3)),)
    assert boxes_of_range((5, 3), 6, 6) == ()
    assert boxes_of_range((), 0, 1) == (Box((), ()),)
    assert boxes_of_range((0, 3), 0, 0) == ()


def test_intersections() -> None:
    assert Box((0, 2), (4, 3)).meet(Box((3, 0), (5, 3))) == Box((3, 2), (1, 1))
    assert Box((0,), (4,)).meet(Box((4,), (1,))) is None
    assert Box((), ()).meet(Box((), ())) == Box((), ())
