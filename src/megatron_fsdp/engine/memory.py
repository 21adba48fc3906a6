"""The memory that collectives read and write: shards, slots for gathered weights, buckets and scratch for gradients.

All of it comes from one `CommunicationPool`: block by block when it is needed, or, where addresses have to stay, as one
stretch that is taken at wrap time and in which the same block lies at the same offset on every rank.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.config.engine_options import MemoryOptions, WeightAllocator
from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.engine.schedule import ScheduleConfig
from megatron_fsdp.sharding.memory_plan import (
    PoolPlan,
    UnitWeights,
    Use,
    WeightPlan,
    WeightStorage,
    plan_pool,
    plan_weights,
    prefetch_depth,
)
from megatron_fsdp.sharding.units import ROOT_UNIT

Result = TypeVar("Result")

_POISON = 0xFF
BLOCK_ALIGNMENT_BYTES = 128  # groups that share a borrowed block start at multiples of this
OUTER_REDUCTIONS = 2
"""Units whose gradients are in reduction over the outer axis at a time."""


class Block:
    """A stretch of memory that gives typed views.

    It can be emptied and refilled, whole or in part: the memory is freed and allocated again, and views stay valid,
    since the storage object that they refer to is the same. Their content is lost. A block that is a part of a pool's
    memory keeps it: emptying and refilling it do nothing.

    Args:
        num_bytes: Its size.
        device: Where its memory is allocated.
        memory: A part of a pool's memory, (num_bytes,) of uint8, in place of an allocation.
    """

    def __init__(self, num_bytes: int, device: torch.device, memory: torch.Tensor | None = None) -> None:
        self.is_kept = memory is not None
        with torch.inference_mode(False):
            # `data`: writes into one part must not count as modifications of what autograd saved of another.
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device) if memory is None else memory.data
        self.storage = self._bytes.untyped_storage()._cdata  # the same for as long as the block lives
        self._start = self._bytes.storage_offset()
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Its size, the most that it can hold."""
        return self._bytes.numel()

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now: its size, or 0 while it is empty."""
        return self.num_bytes if self.is_kept else self._bytes.untyped_storage().nbytes()

    def empty(self) -> None:
        """Free the memory. Views must not be read until it is refilled."""
        if not self.is_kept:
            self._bytes.untyped_storage().resize_(0)

    def refill(self) -> None:
        """Allocate memory again, uninitialised; nothing happens where there is some."""
        if not self.held_bytes:
            self.hold(self.num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Allocate memory for views that end at `num_bytes`; memory of that size stays as it is."""
        if self.held_bytes != num_bytes and not self.is_kept:
            storage = self._bytes.untyped_storage()
            storage.resize_(0)  # else old and new memory would exist at a time, and the content would be copied
            storage.resize_(num_bytes)

    def poison(self) -> None:
        """Fill it with bytes of ones, which is NaN in every floating dtype; nothing happens where it is empty."""
        if self.held_bytes:
            self._bytes[: self.held_bytes].fill_(_POISON)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view of this memory."""
        if storage_of(tensor) != self.storage or not self.held_bytes:
            return False
        return self._start <= tensor.storage_offset() * tensor.itemsize < self._start + self.num_bytes

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` elements of `dtype` from `offset_bytes` on, as a flat tensor; the same one every time."""
        key = offset_bytes, numel, dtype
        if key not in self._views:
            with torch.inference_mode(False):  # autograd saves views of this memory, also if evaluation uses it first
                stop = offset_bytes + numel * dtype.itemsize
                self._views[key] = self._bytes[offset_bytes:stop].view(dtype)
        return self._views[key]


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return what identifies a tensor's storage; None where it has none of its own."""
    if tensor.layout is not torch.strided or isinstance(tensor, DTensor):
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # wrappers such as those of vmap have no storage
        return None


def pack_bytes(lengths_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Place stretches one after another, each aligned; return their offsets and the total, in bytes."""
    offsets, cursor = [], 0
    for length in lengths_bytes:
        offsets.append(cursor)
        cursor += -(-length // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
    return tuple(offsets), cursor


class CommunicationPool:
    """The owner of communication memory: hands out its blocks.

    Args:
        device: Device of the memory.
        plan: The blocks that are taken now, in one stretch, and kept; None: every block is allocated when it is made.
        allocate: Allocates a number of bytes, zeros of uint8, for that; None: on the device.

    Attributes:
        plan: As given.
    """

    def __init__(
        self,
        device: torch.device,
        plan: PoolPlan | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.plan = plan
        self._device = device
        self._planned = {} if plan is None else {(block.use, block.number): block for block in plan.blocks}
        self._memory: torch.Tensor | None = None
        if plan is not None:
            with torch.inference_mode(False):
                self._memory = (allocate or self._zeros)(plan.num_bytes)

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def memory_of(self, use: Use, number: int) -> torch.Tensor | None:
        """Return the memory of a planned block, (num_bytes,) of uint8; None where there is no such block."""
        found = self._planned.get((use, number))
        if found is None:
            return None
        assert self._memory is not None
        return self._memory[found.offset : found.offset + found.num_bytes]

    def shard(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for what a rank sends of group `number`, zeros (numel,); None where it has to allocate some."""
        part = self.memory_of(Use.SHARD, number)
        # `data`: whoever compares versions of these weights must not see what is written next to them.
        return None if part is None else part.view(dtype)[:numel].data

    def planned(self, use: Use, num_bytes: int) -> int:
        """Count the blocks of one use that are taken already and large enough."""
        return sum(block.use is use and block.num_bytes >= num_bytes for block in self._planned.values())

    def make(self, use: Use, number: int, num_bytes: int) -> Block:
        """Make a block, once for each number: the planned one if that is large enough, else one with its own memory."""
        part = self.memory_of(use, number)
        fits = part is not None and part.numel() >= num_bytes
        return Block(part.numel(), self._device, part) if fits and part is not None else Block(num_bytes, self._device)


class BucketPool:
    """A few blocks that are borrowed and given back, each as long as its borrower needs.

    Args:
        pool: Where the blocks come from.
        use: What they are for.
        count: How many there are.
        sizes_bytes: What each borrower needs.
        make_room: Called when all are out; gives some back, or returns False where nothing can be waited for (then
            the pool grows: several units that fill at once each need one).

    Attributes:
        peak_bytes: The most that was held at a time.
    """

    def __init__(
        self, pool: CommunicationPool, use: Use, count: int, sizes_bytes: Sequence[int], make_room: Callable[[], object]
    ) -> None:
        self._pool = pool
        self._use = use
        self._count = count
        self._num_bytes = num_bytes = max(sizes_bytes, default=0)
        self._usual_bytes = most_common(sizes_bytes)
        self._make_room = make_room
        self._made = [pool.make(use, number, num_bytes) for number in range(pool.planned(use, num_bytes))]
        self._free = list(self._made)
        self.peak_bytes = self.held_bytes

    def borrow(self, num_bytes: int | None = None) -> Block:
        """Borrow a block; make room first where all are out."""
        while len(self._made) - len(self._free) >= self._count and self._make_room():
            pass  # also where the pool grew once: there may be free blocks besides those out
        if not self._free or len(self._made) < self._count:  # their number must not depend on when others come back
            self._made.append(self._pool.make(self._use, len(self._made), self._num_bytes))
            self._free.insert(0, self._made[-1])
        block = self._free.pop(0)
        block.hold(self._num_bytes if num_bytes is None else num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return block

    def give_back(self, block: Block) -> None:
        """Return a borrowed block: lent after free ones with memory, before those that take some.

        A longer one than usual, such as an embedding's, gives its memory back.
        """
        if block.held_bytes > self._usual_bytes:
            block.empty()
        self._free.insert(sum(free.held_bytes > 0 for free in self._free), block)

    def set_count(self, count: int) -> None:
        """Change the number of blocks; those too many are dropped when they are not out, unless they are kept."""
        self._count = count
        while self._free and len(self._made) > count and not self._free[-1].is_kept:
            dropped = self._free.pop()
            self._made = [block for block in self._made if block is not dropped]

    def reclaim(self) -> None:
        """Take every borrowed block back (after an exception)."""
        self._free = list(self._made)

    def empty(self) -> None:
        """Free the memory of the blocks that are not out; it is allocated again when they are borrowed."""
        for block in self._free:
            block.empty()
        self._free.sort(key=self._made.index)  # so that every step borrows the same ones in turn

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return sum(block.held_bytes for block in self._made)


def most_common(sizes: Sequence[int]) -> int:
    """Return the size that occurs most often, of several the largest; 0 where there is none."""
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size), default=0)


def weakly(method: Callable[[], Result]) -> Callable[[], Result | None]:
    """Call a bound method for as long as its object lives, after that return None."""
    reference = weakref.WeakMethod(method)

    def call() -> Result | None:
        alive = reference()
        return None if alive is None else alive()

    return call


GroupPlans = Sequence[GroupPlan]
"""The groups of one unit."""

_BUCKETS = 2  # one fills while the other is being reduced


@dataclass(frozen=True)
class MemoryPlan:
    """How one model borrows memory and when it communicates.

    Attributes:
        allocator: What the caller chose.
        weights: The plan of gathered weights' memory.
        schedule: Configuration of the scheduler.
        buckets: How many units besides the root fill a bucket or have one in reduction at a time.
        may_grow: Whether a larger prefetch size may bring more slots.
        pool: The blocks that are taken at wrap time and kept; None: none are.
    """

    allocator: WeightAllocator
    weights: WeightPlan
    schedule: ScheduleConfig
    buckets: int
    may_grow: bool
    pool: PoolPlan | None = None


def plan_memory(options: MemoryOptions, reduces_early: bool, units: Sequence[GroupPlans]) -> MemoryPlan:
    """Plan memory and schedule from the caller's options and the groups of a model; allocates nothing."""
    forward, backward, slots, buckets = (
        options.forward_prefetch_units,
        options.backward_prefetch_units,
        options.slots,
        _BUCKETS,
    )
    if options.communication_unit_numel is not None:
        numels = unit_numels(units)
        depth = prefetch_depth(options.communication_unit_numel, numels)
        if options.may_grow:
            slots = max(slots, depth + 1)
        forward = backward = min(depth, slots - 1)
        buckets = bucket_count(options.communication_unit_numel, units)
    weights = plan_weights(options.allocator, [_weights_of(unit) for unit in units], slots, options.is_kept)
    groups = [group for unit in units for group in unit]
    resized = frozenset(weights.units_in(WeightStorage.RESIZED))
    schedule = ScheduleConfig(
        trainable=tuple(any(group.requires_grad for group in unit) for unit in units),
        gathers=any(group.needs_all_gather or group.gathers_outer or group.shards_compute_weights for group in groups),
        shares_slots=any(group.gathered_bytes for group in groups),
        slots=slots,
        forward_prefetch_units=forward,
        backward_prefetch_units=backward,
        reduces_early=reduces_early,
        resized=resized - {ROOT_UNIT},
        kept=frozenset(weights.units_in(WeightStorage.OWN)) - {ROOT_UNIT},
        returned=resized,
        returned_before_step=frozenset(
            unit
            for unit in weights.units_in(WeightStorage.FOR_STEP)
            if any(group.shards_compute_weights for group in units[unit])
        ),
    )
    at_a_time = buckets if reduces_early else max(buckets, sum(schedule.trainable[ROOT_UNIT + 1 :]))
    pool = plan_pool(_block_sizes(weights, buckets, at_a_time, units)) if options.is_kept else None
    return MemoryPlan(options.allocator, weights, schedule, buckets, options.may_grow, pool)


def _block_sizes(
    weights: WeightPlan, buckets: int, filled: int, units: Sequence[GroupPlans]
) -> dict[Use, Sequence[int]]:
    """Return the bytes of every block that the collectives of a model use, by use and number.

    Args:
        weights: The plan of gathered weights' memory.
        buckets: How many units besides the root fill a bucket or have one in reduction at a time.
        filled: The same where all buckets fill before any is reduced.
        units: The groups of each unit, root first.
    """
    own = weights.units_in(WeightStorage.OWN)
    needed = [pack_bytes([group.bucket_bytes for group in unit])[1] for unit in units]
    scratch = max(needed) if any(group.exchanges_inner for group in chain.from_iterable(units)) else 0
    crossing = max((crossing_offsets(unit)[1] for unit in units), default=0)
    return {
        Use.SHARD: [group.shard_bytes for group in chain.from_iterable(units)],
        Use.SLOT: [weights.slot_bytes] * weights.slots_used,
        Use.UNIT: [size if unit in own else 0 for unit, size in enumerate(weights.gathered_bytes)],
        Use.ROOT_BUCKET: needed[: ROOT_UNIT + 1],
        Use.BUCKET: [max(needed[ROOT_UNIT + 1 :], default=0)] * filled,
        Use.SCRATCH: [scratch] * max(1, buckets - 1),
        Use.CROSSING: [crossing] * OUTER_REDUCTIONS,
    }


def crossing_offsets(unit: GroupPlans) -> tuple[tuple[int, ...], int]:
    """Place what the groups of a unit send over the outer axis, and what they receive, in one block."""
    return pack_bytes([length for group in unit for length in (group.crossing_bytes, group.received_bytes)])


def unit_numels(units: Sequence[GroupPlans]) -> list[int]:
    """Return the elements of each unit besides the root, padding included."""
    return [sum(group.layout.numel for group in unit) for unit in units[ROOT_UNIT + 1 :]]


def bucket_count(numel: int, units: Sequence[GroupPlans]) -> int:
    """Return how many buckets, each for the largest unit, fit into `numel` elements: 1 to the number of units."""
    largest = max(unit_numels(units), default=0)
    trainable = sum(any(group.requires_grad for group in unit) for unit in units[ROOT_UNIT + 1 :])
    return max(1, min(numel // max(1, largest), trainable))


def _weights_of(unit: GroupPlans) -> UnitWeights:
    in_slots = [group for group in unit if group.shards_compute_weights]
    return UnitWeights(
        pack_bytes([group.gathered_bytes for group in unit])[1],
        tuple((group.layout.numel, group.precision.compute) for group in in_slots),
    )


class WeightMemory:
    """The memory of gathered weights of one model.

    Attributes:
        peak_bytes: The most that was held at a time.
    """

    def __init__(self, plan: WeightPlan, pool: CommunicationPool) -> None:
        self._plan = plan
        self._slot_bytes = plan.slot_bytes
        self._pool = pool
        self._blocks: dict[tuple[Use, int], Block] = {}  # slots and units with memory of their own, once they were used
        self.peak_bytes = 0
        if plan.taken_at_once:
            for slot in range(plan.slots_used):
                self._block(Use.SLOT, slot, self._slot_bytes)
            for unit in plan.units_in(WeightStorage.OWN):
                self._block(Use.UNIT, unit, plan.gathered_bytes[unit])
            self._note_peak()

    def take(self, unit: int, slot: int | None) -> Block:
        """Return the block that a unit is gathered into: that of a slot is always the same storage.

        A slot that is not taken when wrapping is as long as the unit in it: an embedding or a head may be several times
        as large as all others.
        """
        if self._plan.storages[unit] is WeightStorage.SLOT:
            assert slot is not None
            block = self._block(Use.SLOT, slot, self._slot_bytes)
            if not self._plan.taken_at_once:
                block.hold(self._plan.gathered_bytes[unit])
        else:
            block = self._block(Use.UNIT, unit, self._plan.gathered_bytes[unit])
            block.refill()
        self._note_peak()
        return block

    @property
    def storages(self) -> set[int]:
        """The numbers of the storages that gathered weights have been in; see `storage_of`."""
        return {block.storage for block in self._blocks.values()}

    def give_back(self, unit: int) -> bool:
        """Release a unit's block; return whether its memory was freed."""
        block = self._blocks.get((Use.UNIT, unit))
        if block is None or self._plan.storages[unit] not in (WeightStorage.RESIZED, WeightStorage.FOR_STEP):
            return False
        block.empty()
        return True

    def _block(self, use: Use, number: int, num_bytes: int) -> Block:
        if (use, number) not in self._blocks:
            self._blocks[use, number] = self._pool.make(use, number, num_bytes)
        return self._blocks[use, number]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return sum(block.held_bytes for block in self._blocks.values())
