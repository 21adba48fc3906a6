"""Places of units under each allocator, their peak, and how far a number of elements reaches; by hand."""

import pytest
import torch

from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.engine.memory_plan import (
    UnitWeights,
    WeightStorage,
    most_common_shape,
    plan_weights,
    prefetch_depth,
)
from megatron_fsdp.errors import ConfigurationError
from tests.support.formulas import gathered_peak_bytes

BF16, FP32 = torch.bfloat16, torch.float32
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


def test_the_most_common_shape_is_the_larger_one_of_equals() -> None:
    units = [unit(80), unit(80, BF16), unit(80, BF16)]
    assert most_common_shape(units) == ((40, BF16),)
    assert most_common_shape([unit(40), unit(80), unit(120), unit(80), unit(40)]) == ((20, FP32),)
    for allocator in WeightAllocator:
        assert gathered_peak_bytes(plan_weights(allocator, [UnitWeights(0)] * 4, 2)) == 0
        assert gathered_peak_bytes(plan_weights(allocator, [UnitWeights(16)], 2)) == 16


def test_as_many_units_are_gathered_ahead_as_fit_whichever_they_are() -> None:
    depths = {0: 0, 1: 1, 30: 1, 49: 1, 50: 2, 60: 3, 10**12: 3}
    assert {numel: prefetch_depth(numel, [20, 30, 10]) for numel in depths} == depths
    assert prefetch_depth(100, []) == 0
    with pytest.raises(ConfigurationError) as caught:
        prefetch_depth(-1, [20])
    assert str(caught.value) == "-1 elements cannot be gathered ahead; give 0 (none) or more."
