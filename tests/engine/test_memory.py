"""Pools of borrowed memory, and where gathered weights lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.engine.memory import Block, BlockPool, CommunicationPool
from megatron_fsdp.engine.memory_plan import (
    UnitWeights,
    Use,
    WeightStorage,
    plan_weights,
    prefetch_depth,
)
from megatron_fsdp.errors import ConfigurationError

CPU = torch.device("cpu")


POOL = CommunicationPool(CPU)


def room_maker(pool_of: Callable[[], BlockPool], lent: list[Block], log: list[str]) -> Callable[[], bool]:
    """Gives the oldest lent block back, as the end of a reduction does."""

    def make_room() -> bool:
        log.append("asked")
        if not lent:
            return False
        pool_of().give_back(lent.pop(0))
        return True

    return make_room


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


def test_as_many_units_are_gathered_ahead_as_fit_whichever_they_are() -> None:
    depths = {0: 0, 1: 1, 30: 1, 49: 1, 50: 2, 60: 3, 10**12: 3}
    assert {numel: prefetch_depth(numel, [20, 30, 10]) for numel in depths} == depths
    assert prefetch_depth(100, []) == 0
    with pytest.raises(ConfigurationError) as caught:
        prefetch_depth(-1, [20])
    assert str(caught.value) == "-1 elements cannot be gathered ahead; give 0 (none) or more."
