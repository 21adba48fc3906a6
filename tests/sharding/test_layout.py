"""Layouts: hand-checked placements, queries on odd tensors, and every refusal with its message."""

from megatron_fsdp.sharding.layout import Layout, plan_layout

WHOLE_ROWS = 1e6
"""A waste that is always worth whole rows."""


def local_shape(layout: Layout, index: int, rank: int) -> tuple[int, ...]:
    """The shape of a rank's shard of a tensor."""
    start, stop = layout.local_range(index, rank)
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
    assert layout.shard_range(1) == (7, 14)
    assert [layout.local_range(0, rank) for rank in range(2)] == [(0, 3), (3, 6)]
    assert [layout.local_range(1, rank) for rank in range(2)] == [(0, 4), (4, 4)]
    assert (layout.tensor_numel(0), layout.payload_numel, layout.padding_numel) == (6, 10, 4)
