"""From the caller's options and the finished units to what scheduler and executor are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fsdp.memory_options import MemoryOptions
from megatron_fsdp.runtime.schedule import ROOT, ScheduleConfig
from megatron_fsdp.unit.unit import Unit
from megatron_fsdp.weight_plan import Place, UnitWeights, WeightAllocator, WeightPlan, plan_weights, prefetch_depth

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


def plan_memory(options: MemoryOptions, reduces_early: bool, units: Sequence[Unit]) -> MemoryPlan:
    """Settle what depends on the model.

    Args:
        options: The caller's.
        reduces_early: Whether units are reduced during backward.
        units: All units, root first.
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
    groups = [group for unit in units for group in unit.groups]
    resized = frozenset(weights.units_in(Place.RESIZED))
    schedule = ScheduleConfig(
        trainable=tuple(unit.trainable for unit in units),
        gathers=any(group.is_gathered or group.weights.gathers_across for group in groups),
        shares_slots=any(group.weights_in_slots for group in groups),
        slots=slots,
        prefetch_forward=forward,
        prefetch_backward=backward,
        reduces_early=reduces_early,
        homeless=resized - {ROOT},
        private=frozenset(weights.units_in(Place.OWN)) - {ROOT},
        returned=resized,
    )
    return MemoryPlan(options.allocator, weights, schedule, buckets, options.may_grow)


def unit_numels(units: Sequence[Unit]) -> list[int]:
    """Elements of each unit besides the root, padding included."""
    return [sum(group.plan.layout.numel for group in unit.groups) for unit in units if unit.index != ROOT]


def bucket_count(numel: int, units: Sequence[Unit]) -> int:
    """How many buckets, each for the largest unit, fit into a number of elements: at least 1, at most one per unit."""
    largest = max(unit_numels(units), default=0)
    trainable = sum(unit.trainable for unit in units if unit.index != ROOT)
    return max(1, min(numel // max(1, largest), trainable))


def _weights_of(unit: Unit) -> UnitWeights:
    shape = tuple(
        (group.plan.layout.numel, group.plan.precision.compute) for group in unit.groups if group.weights_in_slots
    )
    return UnitWeights(unit.gathered_bytes, shape)
