"""Blocks of gathered weights: taken when the plan says, given back when it says, the same memory where it must be."""

import torch

from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.engine.memory import CommunicationPool, WeightMemory
from megatron_fsdp.sharding.memory_plan import UnitWeights, plan_weights

SIZES = (1024, 256, 256, 512)


def memory(allocator: WeightAllocator) -> WeightMemory:
    units = [UnitWeights(size, ((size // 4, torch.float32),)) for size in SIZES]
    return WeightMemory(plan_weights(allocator, units, 2), CommunicationPool(torch.device("cpu")))


def test_slots_are_shared_and_kept_and_as_long_as_the_unit_in_them() -> None:
    weights = memory(WeightAllocator.SLOTS)
    assert weights.held_bytes == 0
    first = weights.take(1, 0)
    view = first.view(0, 64, torch.float32)
    assert weights.held_bytes == 256
    assert weights.take(3, 0) is first
    assert weights.held_bytes == 512
    assert weights.take(2, 1) is not first
    assert not weights.give_back(3)
    assert weights.held_bytes == weights.peak_bytes == 512 + 256
    assert weights.take(1, 0).view(0, 64, torch.float32) is view
    assert (weights.held_bytes, weights.peak_bytes) == (2 * 256, 512 + 256)
    view.fill_(3.0)
    assert weights.take(1, 0).view(0, 64, torch.float32).eq(3.0).all()  # nothing moves where the size is the same


def test_slots_that_are_taken_when_wrapping_are_all_as_long_as_the_largest_unit() -> None:
    weights = memory(WeightAllocator.MAX_POOL)
    weights.take(1, 0)
    assert weights.held_bytes == 1024 + 2 * 512


def test_the_root_beside_slots_is_there_for_a_step_and_stays_the_same_memory() -> None:
    weights = memory(WeightAllocator.SLOTS)
    root = weights.take(0, None)
    assert weights.held_bytes == 1024
    assert weights.give_back(0)
    assert (weights.held_bytes, weights.peak_bytes) == (0, 1024)
    assert weights.take(0, None) is root
    assert root.held_bytes == 1024


def test_beside_double_buffers_the_root_is_kept() -> None:
    weights = memory(WeightAllocator.MAX_POOL)
    weights.take(0, None)
    assert not weights.give_back(0)
    assert weights.held_bytes == 1024 + 2 * 512


def test_resized_blocks_are_there_while_they_are_taken() -> None:
    weights = memory(WeightAllocator.RESIZE)
    root, first = weights.take(0, None), weights.take(1, 0)
    assert weights.held_bytes == 1024 + 256
    assert weights.give_back(1)
    assert weights.take(3, 0) is not first
    assert weights.held_bytes == weights.peak_bytes == 1024 + 512
    assert weights.give_back(3)
    assert weights.give_back(0)
    assert (weights.held_bytes, weights.peak_bytes) == (0, 1024 + 512)
    assert weights.take(1, 1) is first
    assert weights.take(0, None) is root


def test_giving_back_what_was_never_taken_gives_nothing_back() -> None:
    assert not memory(WeightAllocator.RESIZE).give_back(2)


def test_double_buffers_are_there_from_the_beginning() -> None:
    held = {each: memory(each).held_bytes for each in WeightAllocator}
    assert held == {
        WeightAllocator.SLOTS: 0,
        WeightAllocator.RESIZE: 0,
        WeightAllocator.DOUBLE_BUFFER: 1024 + 2 * 256,
        WeightAllocator.PERSISTENT_DOUBLE_BUFFER: 1024 + 2 * 256 + 512,
        WeightAllocator.MAX_POOL: 1024 + 2 * 512,
    }
