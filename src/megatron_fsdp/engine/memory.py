"""The memory that weights are gathered into: slots, kept buffers and storages that come and go, as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.engine.pools import Block, SlotPool, pack_bytes
from megatron_fsdp.engine.schedule import ROOT, ScheduleConfig
from megatron_fsdp.sharding.memory_plan import (
    MemoryOptions,
    Place,
    UnitWeights,
    WeightAllocator,
    WeightPlan,
    plan_weights,
    prefetch_depth,
)

# From the caller's options and the groups of all units to what scheduler and executor are told. Pure.

GroupPlans = Sequence[GroupPlan]
"""The groups of one unit."""

_BUCKETS = 2  # one fills while the other is being reduced


@dataclass(frozen=True)
class MemoryPlan:
    """How one model borrows memory and when it communicates.

    Attributes:
        allocator: What the caller chose.
        weights: Where gathered weights live.
        schedule: For the scheduler.
        buckets: How many units besides the root fill a bucket or have one in reduction at a time.
        may_grow: Whether a larger prefetch size may bring more slots.
    """

    allocator: WeightAllocator
    weights: WeightPlan
    schedule: ScheduleConfig
    buckets: int
    may_grow: bool


def plan_memory(options: MemoryOptions, reduces_early: bool, units: Sequence[GroupPlans]) -> MemoryPlan:
    """Settle what depends on the model.

    Args:
        options: The caller's.
        reduces_early: Whether units are reduced during backward.
        units: The groups of each unit, root first.
    """
    forward, backward, slots, buckets = options.forward_depth, options.backward_depth, options.slots, _BUCKETS
    if options.communication_unit_numel is not None:
        numels = unit_numels(units)
        depth = prefetch_depth(options.communication_unit_numel, numels)
        if options.may_grow:
            slots = max(slots, depth + 1)
        forward = backward = min(depth, slots - 1)
        buckets = bucket_count(options.communication_unit_numel, units)
    weights = plan_weights(options.allocator, [_weights_of(unit) for unit in units], slots)
    groups = [group for unit in units for group in unit]
    resized = frozenset(weights.units_in(Place.RESIZED))
    schedule = ScheduleConfig(
        trainable=tuple(any(group.requires_grad for group in unit) for unit in units),
        gathers=any(group.is_gathered or group.gathers_across for group in groups),
        shares_slots=any(group.gathered_bytes for group in groups),
        slots=slots,
        prefetch_forward=forward,
        prefetch_backward=backward,
        reduces_early=reduces_early,
        homeless=resized - {ROOT},
        private=frozenset(weights.units_in(Place.OWN)) - {ROOT},
        returned=resized,
        returned_before_step=frozenset(
            unit for unit in weights.units_in(Place.FOR_STEP) if any(group.weights_in_slots for group in units[unit])
        ),
    )
    return MemoryPlan(options.allocator, weights, schedule, buckets, options.may_grow)


def unit_numels(units: Sequence[GroupPlans]) -> list[int]:
    """Elements of each unit besides the root, padding included."""
    return [sum(group.layout.numel for group in unit) for unit in units[ROOT + 1 :]]


def bucket_count(numel: int, units: Sequence[GroupPlans]) -> int:
    """How many buckets, each for the largest unit, fit into a number of elements: at least 1, at most one per unit."""
    largest = max(unit_numels(units), default=0)
    trainable = sum(any(group.requires_grad for group in unit) for unit in units[ROOT + 1 :])
    return max(1, min(numel // max(1, largest), trainable))


def _weights_of(unit: GroupPlans) -> UnitWeights:
    in_slots = [group for group in unit if group.weights_in_slots]
    return UnitWeights(
        pack_bytes([group.gathered_bytes for group in unit])[1],
        tuple((group.layout.numel, group.precision.compute) for group in in_slots),
    )


class WeightMemory:
    """Hands out the block of a unit and takes it back. Belongs to one model.

    Args:
        plan: Where each unit lives.
        device: Where the memory lives.

    Attributes:
        peak_bytes: The most that was held at a time.
    """

    def __init__(self, plan: WeightPlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._slots = SlotPool(plan.slot_bytes, device)
        self._own: dict[int, Block] = {}
        self.peak_bytes = 0
        if plan.taken_at_once:
            for slot in range(plan.slots_used):
                self._slots.block(slot)
            for unit in plan.units_in(Place.OWN):
                self._block_of(unit)
        self._note_peak()

    def take(self, unit: int, slot: int | None) -> Block:
        """The block that a unit is gathered into.

        Args:
            unit: Index of the unit.
            slot: The slot that the scheduler gave it; matters to units that live in slots.
        """
        if self._plan.places[unit] is Place.SLOT:
            assert slot is not None
            if self._slots.has(slot):
                return self._slots.block(slot)
            block = self._slots.block(slot)
        else:
            block = self._block_of(unit)
            block.refill()
        self._note_peak()
        return block

    def give_back(self, unit: int) -> bool:
        """A unit is released; returns whether its memory is gone now."""
        if self._plan.places[unit] not in (Place.RESIZED, Place.FOR_STEP) or unit not in self._own:
            return False
        self._own[unit].empty()
        return True

    def _block_of(self, unit: int) -> Block:
        if unit not in self._own:
            self._own[unit] = Block(self._plan.gathered_bytes[unit], self._device)
        return self._own[unit]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._slots.held_bytes + sum(block.held_bytes for block in self._own.values())
