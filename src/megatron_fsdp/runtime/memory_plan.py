"""From the caller's options and the groups of all units to what scheduler and executor are told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fsdp.buffer.pools import pack_bytes
from megatron_fsdp.memory_options import MemoryOptions
from megatron_fsdp.runtime.schedule import ROOT
from megatron_fsdp.runtime.schedule_config import ScheduleConfig
from megatron_fsdp.unit.group_plan import GroupPlan
from megatron_fsdp.weight_plan import Place, UnitWeights, WeightAllocator, WeightPlan, plan_weights, prefetch_depth

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
        gathers=any(group.gathered_by_unit or group.gathers_across for group in groups),
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
    in_slots = [group for group in unit if group.weights_in_slots and not group.shares_weights]
    return UnitWeights(
        pack_bytes([group.gathered_bytes for group in unit])[1],
        tuple((group.layout.numel, group.precision.compute) for group in in_slots),
    )
