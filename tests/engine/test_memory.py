"""Flat buffers, and the pools of borrowed memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.engine.memory import Block, BlockPool, CommunicationPool, FlatBuffer, full_view
from megatron_fsdp.engine.memory_plan import (
    UnitWeights,
    Use,
    WeightStorage,
    plan_weights,
    prefetch_depth,
)
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.layout import Layout, plan_layout
from megatron_fsdp.sharding.placement import Region
from tests.support.formulas import gathered_peak_bytes

CPU = torch.device("cpu")
shape_lists = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6)


def whole_buffer(layout: Layout, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    return FlatBuffer(layout, Region(0, layout.numel), torch.zeros(layout.numel, dtype=dtype))


def shard_buffer(layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    region = shard_region(layout, rank)
    return FlatBuffer(layout, region, torch.zeros(region.numel, dtype=dtype))


def shard_region(layout: Layout, rank: int) -> Region:
    return Region(*layout.shard_range(rank))


def numbered(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Tensors whose elements are all different and none 0."""
    starts = [1 + sum(math.prod(shape) for shape in shapes[:i]) for i in range(len(shapes))]
    return [
        torch.arange(start, start + math.prod(shape), dtype=torch.float32).view(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]


@given(shape_lists, st.integers(1, 5), st.sampled_from([1, 4]))
def test_parts_in_rank_order_are_the_full_buffer(
    shapes: list[tuple[int, ...]], num_ranks: int, alignment_numel: int
) -> None:
    layout = plan_layout(shapes, num_ranks, alignment_numel=alignment_numel)
    tensors = numbered(shapes)
    full = whole_buffer(layout)
    shards = [shard_buffer(layout, rank) for rank in range(num_ranks)]
    for index, tensor in enumerate(tensors):
        for buffer in (full, *shards):
            buffer.store(index, tensor)
    assert full.local.numel() == layout.numel
    assert all(shard.local.numel() == layout.shard_numel for shard in shards)
    assert torch.equal(torch.cat([shard.local for shard in shards]), full.local)
    for index, tensor in enumerate(tensors):
        assert torch.equal(full_view(layout, full.local, index), tensor)
        joined = torch.cat([shard.local_shard(index).reshape(-1) for shard in shards])
        assert torch.equal(joined, tensor.reshape(-1))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_part_of_a_full_buffer_is_a_buffer_that_shares_its_memory(rank: int) -> None:
    layout = plan_layout([(6, 2)], 3)
    full = whole_buffer(layout)
    full.store(0, torch.arange(12.0).view(6, 2))
    region = shard_region(layout, rank)
    part = FlatBuffer(layout, region, full.view_of(region))
    assert full.is_whole
    assert not part.is_whole
    assert torch.equal(part.local_shard(0), torch.arange(12.0).view(6, 2)[2 * rank : 2 * rank + 2])
    part.local.fill_(-1.0)
    assert full.local_shard(0)[2 * rank].tolist() == [-1.0, -1.0]
    assert part.local.data_ptr() == full.view_of(shard_region(layout, rank)).data_ptr()


@given(shape_lists, st.integers(1, 5), st.sampled_from([1, 4]))
def test_all_shards_at_once_are_those_of_one_at_a_time(
    shapes: list[tuple[int, ...]], num_ranks: int, alignment_numel: int
) -> None:
    layout = plan_layout(shapes, num_ranks, alignment_numel=alignment_numel)
    tensors = numbered(shapes)
    given_tensors = [None if index == 1 else tensor for index, tensor in enumerate(tensors)]
    for rank in range(num_ranks):
        together, alone = shard_buffer(layout, rank, torch.float64), shard_buffer(layout, rank, torch.float64)
        together.store_all(given_tensors)
        for index, tensor in enumerate(given_tensors):
            if tensor is not None:
                alone.store(index, tensor)
        assert torch.equal(together.local, alone.local)
        start = shard_region(layout, rank).start
        for index, (shard, (first, stop, shape)) in enumerate(
            zip(together.local_shards(), layout.shards_in(together.region), strict=True)
        ):
            inside = layout.local_range(index, rank)
            shape_cut = layout.shard_shape(index, inside[1] - inside[0])
            expected = layout.shapes[index] if together.is_whole else shape_cut
            assert shape == tuple(shard.shape) == expected
            assert stop - first == inside[1] - inside[0] == shard.numel()
            if shard.numel():
                assert first == layout.offsets[index] + inside[0] - start == shard.storage_offset()


def test_tensors_that_do_not_lie_in_order_are_stored_as_they_read() -> None:
    layout = plan_layout([(4, 3), (2, 5)], 2)
    tensors = [torch.arange(12.0).view(3, 4).t(), torch.arange(20.0).view(2, 10)[:, ::2]]
    shards = [shard_buffer(layout, rank) for rank in range(2)]
    for shard in shards:
        shard.store_all(tensors)
    for index, tensor in enumerate(tensors):
        assert (
            torch.cat([shard.local_shard(index).reshape(-1) for shard in shards]).tolist() == tensor.flatten().tolist()
        )


POOL = CommunicationPool(CPU)


def no_room() -> bool:
    return False


def test_buckets_that_came_back_are_lent_again_in_turn() -> None:
    """How many there are depends on how many were lent, and not on when they came back."""
    pool = BlockPool(POOL, Use.BUCKET, 2, [64], no_room)
    lent = []
    for _ in range(4):
        lent += [pool.borrow()]
        pool.give_back(lent[-1])
    assert lent[0] is not lent[1]
    assert (lent[2] is lent[0], lent[3] is lent[1]) == (True, True)
    assert pool.held_bytes == 128


def room_maker(pool_of: Callable[[], BlockPool], lent: list[Block], log: list[str]) -> Callable[[], bool]:
    """Gives the oldest lent block back, as the end of a reduction does."""

    def make_room() -> bool:
        log.append("asked")
        if not lent:
            return False
        pool_of().give_back(lent.pop(0))
        return True

    return make_room


def test_room_is_made_only_when_all_buckets_are_out() -> None:
    lent: list[Block] = []
    log: list[str] = []
    pool = BlockPool(POOL, Use.BUCKET, 2, [64], room_maker(lambda: pool, lent, log))
    lent += [pool.borrow(), pool.borrow()]
    assert log == []
    oldest = lent[0]
    assert pool.borrow() is oldest
    assert log == ["asked"]
    assert pool.held_bytes == 128


def test_an_end_waits_for_its_neighbour_and_its_neighbour_for_it() -> None:
    lent: list[Block] = []
    log: list[str] = []
    pool = BlockPool(POOL, Use.BUCKET, 2, [64, 64, 96], room_maker(lambda: pool, lent, log))
    for num_bytes, held in ((96, 96), (64, 64), (64, 128), (96, 96)):  # a head, two blocks, an embedding
        lent.append(pool.borrow(num_bytes))
        assert sum(block.held_bytes for block in lent) == held
    assert len(log) == 3


# ---- places of units under each allocator ----------------------------------------------------------------------------


FP32 = torch.float32
SLOT, OWN, FOR_STEP, RESIZED = WeightStorage.SLOT, WeightStorage.OWN, WeightStorage.FOR_STEP, WeightStorage.RESIZED


def unit(num_bytes: int, dtype: torch.dtype = FP32) -> UnitWeights:
    return UnitWeights(num_bytes, ((num_bytes // dtype.itemsize, dtype),))


MODEL = [unit(1000), unit(80), unit(80), unit(200), unit(80), unit(120)]  # the root first


@pytest.mark.parametrize(
    ("allocator", "storages", "slot_bytes"),
    [
        (WeightAllocator.SLOTS, (FOR_STEP, SLOT, SLOT, SLOT, SLOT, SLOT), 200),
        (WeightAllocator.RESIZE, (RESIZED,) * 6, 0),
        (WeightAllocator.DOUBLE_BUFFER, (OWN, SLOT, SLOT, RESIZED, SLOT, RESIZED), 80),
        (WeightAllocator.PERSISTENT_DOUBLE_BUFFER, (OWN, SLOT, SLOT, OWN, SLOT, OWN), 80),
        (WeightAllocator.MAX_POOL, (OWN, SLOT, SLOT, SLOT, SLOT, SLOT), 200),
    ],
)
def test_each_allocator_has_a_place_for_every_unit(
    allocator: WeightAllocator, storages: tuple[WeightStorage, ...], slot_bytes: int
) -> None:
    plan = plan_weights(allocator, MODEL, 2)
    assert plan.storages == storages
    assert plan.slot_bytes == slot_bytes
    assert plan.taken_at_once is (allocator not in (WeightAllocator.SLOTS, WeightAllocator.RESIZE))


@pytest.mark.parametrize(
    ("allocator", "slots", "peak"),
    [
        (WeightAllocator.SLOTS, 1, 1000 + 200),
        (WeightAllocator.SLOTS, 2, 1000 + 80 + 200),
        (WeightAllocator.SLOTS, 9, 1000 + 560),  # not more slots than units
        (WeightAllocator.RESIZE, 3, 1000 + 200 + 80 + 120),
        (WeightAllocator.RESIZE, 9, 1000 + 560),
        (WeightAllocator.DOUBLE_BUFFER, 2, 1000 + 2 * 80 + 200),
        (WeightAllocator.PERSISTENT_DOUBLE_BUFFER, 2, 1000 + 2 * 80 + 200 + 120),
        (WeightAllocator.MAX_POOL, 2, 1000 + 2 * 200),
    ],
)
def test_the_peak_is_what_can_be_gathered_at_a_time(allocator: WeightAllocator, slots: int, peak: int) -> None:
    assert gathered_peak_bytes(plan_weights(allocator, MODEL, slots)) == peak


def test_as_many_units_are_gathered_ahead_as_fit_whichever_they_are() -> None:
    depths = {0: 0, 1: 1, 30: 1, 49: 1, 50: 2, 60: 3, 10**12: 3}
    assert {numel: prefetch_depth(numel, [20, 30, 10]) for numel in depths} == depths
    assert prefetch_depth(100, []) == 0
    with pytest.raises(ConfigurationError) as caught:
        prefetch_depth(-1, [20])
    assert str(caught.value) == "-1 elements cannot be gathered ahead; give 0 (none) or more."
