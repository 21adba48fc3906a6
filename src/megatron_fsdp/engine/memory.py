"""Borrowed memory: slots for gathered weights, buckets and scratch for gradients; the plan that sizes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.config.engine_options import MemoryOptions, WeightAllocator
from megatron_fsdp.engine.group_plan import GroupPlan
from megatron_fsdp.engine.schedule import ROOT, ScheduleConfig
from megatron_fsdp.sharding.memory_plan import (
    UnitWeights,
    WeightPlan,
    WeightStorage,
    plan_weights,
    prefetch_depth,
)

_ALIGNMENT_BYTES = 128
_POISON = 0xFF


class Block:
    """A stretch of memory that gives typed views.

    It can be emptied and refilled, whole or in part: the memory is freed and allocated again, and views stay valid,
    since the storage object that they refer to is the same. Their content is lost.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = self._bytes.untyped_storage()._cdata  # the same for as long as the block lives
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Its size, the most that it can hold."""
        return self._bytes.numel()

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now: its size, or 0 while it is empty."""
        return self._bytes.untyped_storage().nbytes()

    def empty(self) -> None:
        """Free the memory. Views must not be read until it is refilled."""
        self._bytes.untyped_storage().resize_(0)

    def refill(self) -> None:
        """Allocate memory again, uninitialised; nothing happens where there is some."""
        if not self.held_bytes:
            self.hold(self.num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Allocate memory for views that end at `num_bytes`; memory of that size stays as it is."""
        if self.held_bytes != num_bytes:
            storage = self._bytes.untyped_storage()
            storage.resize_(0)  # else old and new memory would exist at a time, and the content would be copied
            storage.resize_(num_bytes)

    def poison(self) -> None:
        """Fill it with bytes of ones, which is NaN in every floating dtype; nothing happens where it is empty."""
        if self.held_bytes:
            self._bytes[: self.held_bytes].fill_(_POISON)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view of this memory."""
        return storage_of(tensor) == self._storage and self.held_bytes != 0

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
        cursor += -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(offsets), cursor


class SlotPool:
    """Numbered blocks, each made at its first use and kept: slot k is always the same memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._blocks: dict[int, Block] = {}

    def block(self, slot: int) -> Block:
        """Return the memory of a slot."""
        if slot not in self._blocks:
            self._blocks[slot] = Block(self._num_bytes, self._device)
        return self._blocks[slot]

    def has(self, slot: int) -> bool:
        """Return whether a slot was used."""
        return slot in self._blocks

    @property
    def held_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(block.num_bytes for block in self._blocks.values())


class BucketPool:
    """A few blocks that are borrowed and given back, each as long as its borrower needs.

    Args:
        count: How many blocks there are.
        num_bytes: The most that any borrower needs.
        device: Device of the blocks.
        make_room: Called when all are out; gives some back, or returns False where nothing can be waited for (then
            the pool grows: several units that fill at once each need one).

    Attributes:
        peak_bytes: The most that was held at a time.
    """

    def __init__(
        self,
        count: int,
        num_bytes: int,
        device: torch.device,
        make_room: Callable[[], bool],
    ) -> None:
        self._count = count
        self._num_bytes = num_bytes
        self._device = device
        self._make_room = make_room
        self._free: list[Block] = []
        self._made: list[Block] = []
        self.peak_bytes = 0

    def borrow(self, num_bytes: int | None = None) -> Block:
        """Borrow a block; make room first where all are out."""
        while len(self._made) - len(self._free) >= self._count and self._make_room():
            pass  # also where the pool grew once: there may be free blocks besides those out
        if not self._free or len(self._made) < self._count:  # their number must not depend on when others come back
            self._made.append(Block(self._num_bytes, self._device))
            self._free.insert(0, self._made[-1])
        block = self._free.pop(0)
        block.hold(self._num_bytes if num_bytes is None else num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return block

    def give_back(self, block: Block) -> None:
        """Return a borrowed block: lent after free ones with memory, before those that take some."""
        self._free.insert(sum(free.held_bytes > 0 for free in self._free), block)

    def set_count(self, count: int) -> None:
        """Change the number of blocks; those too many are dropped when they are not out."""
        self._count = count
        while self._free and len(self._made) > count:
            dropped = self._free.pop()
            self._made = [block for block in self._made if block is not dropped]

    def reclaim(self) -> None:
        """Take every borrowed block back (after an exception)."""
        self._free = list(self._made)

    def empty(self) -> None:
        """Free the memory of the blocks that are not out; it is allocated again when they are borrowed."""
        for block in self._free:
            block.empty()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return sum(block.held_bytes for block in self._made)


def weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """Call a bound method for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> bool:
        alive = reference()
        return alive is not None and alive()

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
    """

    allocator: WeightAllocator
    weights: WeightPlan
    schedule: ScheduleConfig
    buckets: int
    may_grow: bool


def plan_memory(options: MemoryOptions, reduces_early: bool, units: Sequence[GroupPlans]) -> MemoryPlan:
    """Plan memory and schedule from the caller's options and the groups of a model; allocates nothing."""
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
    resized = frozenset(weights.units_in(WeightStorage.RESIZED))
    schedule = ScheduleConfig(
        trainable=tuple(any(group.requires_grad for group in unit) for unit in units),
        gathers=any(group.needs_all_gather or group.gathers_outer for group in groups),
        shares_slots=any(group.gathered_bytes for group in groups),
        slots=slots,
        prefetch_forward=forward,
        prefetch_backward=backward,
        reduces_early=reduces_early,
        resized=resized - {ROOT},
        kept=frozenset(weights.units_in(WeightStorage.OWN)) - {ROOT},
        returned=resized,
        returned_before_step=frozenset(
            unit
            for unit in weights.units_in(WeightStorage.FOR_STEP)
            if any(group.weights_in_slots for group in units[unit])
        ),
    )
    return MemoryPlan(options.allocator, weights, schedule, buckets, options.may_grow)


def unit_numels(units: Sequence[GroupPlans]) -> list[int]:
    """Return the elements of each unit besides the root, padding included."""
    return [sum(group.layout.numel for group in unit) for unit in units[ROOT + 1 :]]


def bucket_count(numel: int, units: Sequence[GroupPlans]) -> int:
    """Return how many buckets, each for the largest unit, fit into `numel` elements: 1 to the number of units."""
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
    """The memory of gathered weights of one model.

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
            for unit in plan.units_in(WeightStorage.OWN):
                self._block_of(unit)
        self._note_peak()

    def take(self, unit: int, slot: int | None) -> Block:
        """Return the block that a unit is gathered into."""
        if self._plan.storages[unit] is WeightStorage.SLOT:
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
        """Release a unit's block; return whether its memory was freed."""
        if self._plan.storages[unit] not in (WeightStorage.RESIZED, WeightStorage.FOR_STEP) or unit not in self._own:
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
