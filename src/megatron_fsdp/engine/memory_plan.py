"""Plans of a model's communication memory and prefetch, made from options and groups. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain

import torch

from megatron_fsdp.config.engine_options import DOUBLE_BUFFERS, MemoryOptions, WeightAllocator
from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.engine.schedule import ScheduleConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.units import ROOT_UNIT


class WeightStorage(Enum):
    """Storage of one unit's gathered weights."""

    SLOT = "slot"  # in numbered slots, shared with other units; freed before a step unless taken when wrapping
    OWN = "own"  # in a persistent buffer of its own
    FOR_STEP = "for a step"  # in a buffer of its own, from its first use to the last backward before weights change
    RESIZED = "resized"  # in a buffer of its own that is allocated only while the unit is gathered


@dataclass(frozen=True)
class UnitWeights:
    """The gathered weights of one unit."""

    block_bytes: int  # of the block that holds them, padding included; 0 where every rank holds them whole anyway
    # elements and dtype of each parameter group; equal shapes fit one another's memory
    shape: tuple[tuple[int, torch.dtype], ...] = ()


@dataclass(frozen=True)
class WeightPlan:
    """A storage for the gathered weights of every unit, the root first."""

    storages: tuple[WeightStorage, ...]
    block_bytes: tuple[int, ...]  # of the block of each unit
    slots: int  # the most units besides the root that are gathered at a time, without those that keep their memory
    # Whether slots and persistent buffers are allocated at wrap time, each slot for the largest unit in it; else at
    # their first use, and a slot is as long as the unit that is in it.
    taken_at_once: bool = False

    def units_in(self, storage: WeightStorage) -> tuple[int, ...]:
        """Return the units with a kind of storage, the root included."""
        return tuple(unit for unit, found in enumerate(self.storages) if found is storage)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for the largest unit that lives in slots."""
        return max((self.block_bytes[unit] for unit in self.units_in(WeightStorage.SLOT)), default=0)

    @property
    def slots_used(self) -> int:
        """Number of slots that are ever allocated: at most that of units that live in slots."""
        return min(self.slots, sum(self.block_bytes[unit] > 0 for unit in self.units_in(WeightStorage.SLOT)))


def plan_weights(
    allocator: WeightAllocator, units: Sequence[UnitWeights], slots: int, is_persistent: bool = False
) -> WeightPlan:
    """Choose a storage for every unit; the root, whose forward surrounds all others, never lives in a slot.

    `slots`: how many units besides the root are gathered at a time. `is_persistent`: take everything at wrap time
    and keep it; what does not live in slots has a buffer of its own.
    """
    others = units[1:]
    if allocator is WeightAllocator.RESIZE:
        of_others = [WeightStorage.RESIZED] * len(others)
    elif allocator in (WeightAllocator.SLOTS, WeightAllocator.MAX_POOL):
        of_others = [WeightStorage.SLOT] * len(others)
    else:
        common = most_common_shape(others)
        odd = WeightStorage.RESIZED if allocator is WeightAllocator.DOUBLE_BUFFER else WeightStorage.OWN
        of_others = [WeightStorage.SLOT if unit.shape == common else odd for unit in others]
    storages = [_ROOT_STORAGE.get(allocator, WeightStorage.OWN), *of_others]
    if is_persistent:
        storages = [storage if storage is WeightStorage.SLOT else WeightStorage.OWN for storage in storages]
    taken_at_once = is_persistent or allocator in DOUBLE_BUFFERS
    return WeightPlan(tuple(storages), tuple(unit.block_bytes for unit in units), slots, taken_at_once)


_ROOT_STORAGE = {WeightAllocator.RESIZE: WeightStorage.RESIZED, WeightAllocator.SLOTS: WeightStorage.FOR_STEP}


class Use(Enum):
    """Use of a block of communication memory."""

    SHARD = "shard"  # a rank's compute weights as collectives use them: its shard (strategy 3), else the full buffer
    SLOT = "slot"  # gathered weights of units that take turns
    UNIT = "unit"  # gathered weights of one unit
    ROOT_BUCKET = "root bucket"
    BUCKET = "bucket"
    SCRATCH = "scratch"  # what a pairwise exchange receives
    OUTER_BUFFER = "outer buffer"  # what travels over the outer axis


@dataclass(frozen=True)
class PlannedBlock:
    """A block of communication memory: its offset and its size, in bytes."""

    use: Use
    number: int  # of the group, slot, unit or block, among those of the same use
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        """Name it, with its offset."""
        return f"{self.use.value} {self.number} at {self.offset:,}"


@dataclass(frozen=True)
class PoolPlan:
    """Offsets of all blocks in the stretch that a pool allocates at wrap time; the same on all ranks."""

    blocks: tuple[PlannedBlock, ...]  # in the order of their offsets
    num_bytes: int


_POOL_ALIGNMENT_BYTES = 512  # as torch's allocator aligns tensors on a GPU


def plan_pool(sizes: Mapping[Use, Sequence[int]]) -> PoolPlan:
    """Place blocks one after another, by use and number; those of 0 bytes take no memory."""
    blocks, cursor = [], 0
    for use in Use:
        for number, num_bytes in enumerate(sizes.get(use, ())):
            if num_bytes:
                blocks.append(PlannedBlock(use, number, cursor, num_bytes))
                cursor += -(-num_bytes // _POOL_ALIGNMENT_BYTES) * _POOL_ALIGNMENT_BYTES
    return PoolPlan(tuple(blocks), cursor)


def most_common_shape(units: Sequence[UnitWeights]) -> tuple[tuple[int, torch.dtype], ...]:
    """Return the most common shape of units; of several the one with most bytes, then the first."""
    sizes = {unit.shape: unit.block_bytes for unit in units if unit.block_bytes}
    counts = Counter(unit.shape for unit in units if unit.block_bytes)
    return max(counts, key=lambda shape: (counts[shape], sizes[shape]), default=())


def prefetch_depth(numel: int, unit_numels: Sequence[int]) -> int:
    """Return the number of units, whichever they are, that fit into `numel` elements; at least 1 unless that is 0."""
    if numel < 0:
        raise ConfigurationError(f"{numel} elements cannot be gathered ahead; give 0 (none) or more.")
    count = sum(total <= numel for total in accumulate(sorted(unit_numels, reverse=True)))
    return min(len(unit_numels), max(count, int(numel > 0)))


BLOCK_ALIGNMENT_BYTES = 128  # groups that share a borrowed block start at multiples of this
OUTER_REDUCTIONS = 2
"""Units whose gradients are in reduction over the outer axis at a time."""


def pack_bytes(lengths_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Place stretches one after another, each aligned; return their offsets and the total, in bytes."""
    offsets, cursor = [], 0
    for length in lengths_bytes:
        offsets.append(cursor)
        cursor += -(-length // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
    return tuple(offsets), cursor


GroupPlans = Sequence[GroupPlan]
"""The groups of one unit."""
_BUCKETS = 2  # one fills while the other is being reduced


@dataclass(frozen=True)
class MemoryPlan:
    """Plan of one model's communication memory and schedule."""

    allocator: WeightAllocator
    weights: WeightPlan
    schedule: ScheduleConfig
    buckets: int  # units besides the root that fill a bucket or have one in reduction at a time
    may_grow: bool  # a larger prefetch size may bring more slots
    pool: PoolPlan | None = None  # the persistent blocks, which are taken at wrap time, if any


def plan_memory(
    options: MemoryOptions, reduces_early: bool, units: Sequence[GroupPlans], kept: Collection[int] = ()
) -> MemoryPlan:
    """Plan memory and schedule from the caller's options and the groups of a model; allocates nothing.

    `kept`: units that are not resharded after their forward.
    """
    forward, backward = options.forward_prefetch_units, options.backward_prefetch_units
    slots, buckets = options.slots, _BUCKETS
    if options.communication_unit_numel is not None:
        numels = unit_numels(units)
        depth = prefetch_depth(options.communication_unit_numel, numels)
        if not (forward or backward):  # nothing is gathered ahead, as with overlap_param_gather=False
            depth = 0
        if options.may_grow:
            slots = max(slots, depth + 1)  # of the units ahead, and of the one in use
        forward = backward = min(depth, slots - 1)
        buckets = bucket_count(options.communication_unit_numel, units)
    weights = plan_weights(options.allocator, [_weights_of(unit) for unit in units], slots, options.is_persistent)
    groups = [group for unit in units for group in unit]
    # Units that every rank holds whole have no memory to give back: one gather serves until weights change.
    whole = frozenset(unit for unit, num_bytes in enumerate(weights.block_bytes) if not num_bytes)
    resized = frozenset(weights.units_in(WeightStorage.RESIZED)) - whole
    schedule = ScheduleConfig(
        trainable=tuple(any(group.requires_grad for group in unit) for unit in units),
        gathers=any(group.needs_all_gather or group.gathers_outer or group.shards_compute_weights for group in groups),
        shares_slots=any(group.gathered_bytes for group in groups),
        slots=slots,
        forward_prefetch_units=forward,
        backward_prefetch_units=backward,
        reduces_early=reduces_early,
        resized=resized,
        without_slot=frozenset(weights.units_in(WeightStorage.OWN)).union(kept, whole) - {ROOT_UNIT},
        resharded_after_backward=resized,
        resharded_before_step=frozenset(
            unit
            for unit, storage in enumerate(weights.storages)
            if storage is WeightStorage.FOR_STEP or (storage is WeightStorage.SLOT and not weights.taken_at_once)
            if any(group.shards_compute_weights for group in units[unit])
        ),
    )
    # Where none is reduced before the backward ends, all units fill a bucket at a time.
    at_a_time = buckets if reduces_early else max(buckets, sum(schedule.trainable[ROOT_UNIT + 1 :]))
    pool = plan_pool(_block_sizes(weights, buckets, at_a_time, units)) if options.is_persistent else None
    return MemoryPlan(options.allocator, weights, schedule, buckets, options.may_grow, pool)


def _block_sizes(
    weights: WeightPlan, buckets: int, filled: int, units: Sequence[GroupPlans]
) -> dict[Use, Sequence[int]]:
    """Return the bytes of every block that the collectives of a model use, by use and number.

    `buckets`: how many units besides the root fill one or have one in reduction at a time; `filled`: the same where all
    fill before any is reduced.
    """
    own = weights.units_in(WeightStorage.OWN)
    # A unit has one bucket, in which its groups lie one behind another.
    needed = [pack_bytes([group.bucket_bytes for group in unit])[1] for unit in units]
    scratch = max(pack_bytes([group.scratch_bytes for group in unit])[1] for unit in units)
    outer_buffer = max((outer_buffer_offsets(unit)[1] for unit in units), default=0)
    return {
        Use.SHARD: [group.shard_bytes for group in chain.from_iterable(units)],
        Use.SLOT: [weights.slot_bytes] * weights.slots_used,
        Use.UNIT: [size if unit in own else 0 for unit, size in enumerate(weights.block_bytes)],
        Use.ROOT_BUCKET: needed[: ROOT_UNIT + 1],
        Use.BUCKET: [max(needed[ROOT_UNIT + 1 :], default=0)] * filled,
        Use.SCRATCH: [scratch] * max(1, buckets - 1),
        Use.OUTER_BUFFER: [outer_buffer] * OUTER_REDUCTIONS,
    }


def outer_buffer_offsets(unit: GroupPlans) -> tuple[tuple[int, ...], int]:
    """Place the outer send and receive buffers of a unit's groups in one block."""
    return pack_bytes([length for group in unit for length in (group.outer_buffer_bytes, group.received_bytes)])


def unit_numels(units: Sequence[GroupPlans]) -> list[int]:
    """Return the elements of each unit besides the root, padding included."""
    return [sum(group.layout.numel for group in unit) for unit in units[ROOT_UNIT + 1 :]]


def bucket_count(numel: int, units: Sequence[GroupPlans]) -> int:
    """Return the number of buckets, each for the largest unit, that fit into `numel` elements: 1 to all units."""
    largest = max(unit_numels(units), default=0)
    trainable = sum(any(group.requires_grad for group in unit) for unit in units[ROOT_UNIT + 1 :])
    return max(1, min(numel // max(1, largest), trainable))


def _weights_of(unit: GroupPlans) -> UnitWeights:
    in_slots = [group for group in unit if group.shards_compute_weights]
    return UnitWeights(
        pack_bytes([group.gathered_bytes for group in unit])[1],
        tuple((group.layout.numel, group.precision.compute) for group in in_slots),
    )
