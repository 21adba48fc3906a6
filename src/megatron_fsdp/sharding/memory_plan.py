"""Where the gathered weights of each unit live, and how far ahead they are gathered. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megatron_fsdp.config.engine_options import DOUBLE_BUFFERS, WeightAllocator
from megatron_fsdp.errors import ConfigurationError


class WeightStorage(Enum):
    """Where one unit's gathered weights live."""

    SLOT = "slot"  # in numbered slots, shared with other units
    OWN = "own"  # in a buffer of its own that is kept
    FOR_STEP = "for a step"  # in a buffer of its own, from its first use to the last backward before weights change
    RESIZED = "resized"  # in a buffer of its own that is allocated only while the unit is gathered


_OF_ITS_OWN = (WeightStorage.OWN, WeightStorage.FOR_STEP)


@dataclass(frozen=True)
class UnitWeights:
    """The gathered weights of one unit.

    Attributes:
        gathered_bytes: Bytes of the block that holds them; 0 where every rank holds them whole anyway.
        shape: Elements and dtype of each parameter group among them; units of equal shape fit one another's memory.
    """

    gathered_bytes: int
    shape: tuple[tuple[int, torch.dtype], ...] = ()


@dataclass(frozen=True)
class WeightPlan:
    """A storage for the gathered weights of every unit, the root first.

    Attributes:
        storages: Kind of storage of each unit.
        gathered_bytes: Bytes of the block of each unit.
        slots: How many units besides the root are gathered at a time, of those that do not keep their memory.
        taken_at_once: Whether slots and kept buffers are allocated at wrap time, each slot for the largest unit in it;
            else at their first use, and a slot is as long as the unit that is in it.
    """

    storages: tuple[WeightStorage, ...]
    gathered_bytes: tuple[int, ...]
    slots: int
    taken_at_once: bool = False

    def units_in(self, storage: WeightStorage) -> tuple[int, ...]:
        """Return the units with a kind of storage, the root included."""
        return tuple(unit for unit, found in enumerate(self.storages) if found is storage)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for the largest unit that lives in slots."""
        return max((self.gathered_bytes[unit] for unit in self.units_in(WeightStorage.SLOT)), default=0)

    @property
    def slots_used(self) -> int:
        """Slots that are ever allocated: not more than there are units to put into them."""
        return min(self.slots, sum(self.gathered_bytes[unit] > 0 for unit in self.units_in(WeightStorage.SLOT)))

    @property
    def peak_bytes(self) -> int:
        """The most that gathered weights take at a time, where units are used in their order.

        Kept buffers (also those kept for a step) and slots that are taken when wrapping count whole. Of the other
        units, as many consecutive ones as there are slots are allocated at a time; the root with all of them.
        """
        kept = sum(self.gathered_bytes[unit] for storage in _OF_ITS_OWN for unit in self.units_in(storage))
        passing = {WeightStorage.RESIZED}
        if self.taken_at_once:
            kept += self.slots_used * self.slot_bytes
        else:
            passing.add(WeightStorage.SLOT)
        in_turn = [unit for unit, storage in enumerate(self.storages) if unit and storage not in _OF_ITS_OWN]
        sizes = [self.gathered_bytes[unit] if self.storages[unit] in passing else 0 for unit in in_turn]
        windows = (sum(sizes[first : first + self.slots]) for first in range(max(1, len(sizes))))
        root = self.gathered_bytes[0] if self.storages[0] is WeightStorage.RESIZED else 0
        return root + kept + max(windows)


def plan_weights(
    allocator: WeightAllocator, units: Sequence[UnitWeights], slots: int, keeps: bool = False
) -> WeightPlan:
    """Choose a storage for every unit; the root, whose forward surrounds all others, never lives in a slot.

    Args:
        allocator: What the caller chose.
        units: All units, the root first.
        slots: How many units besides the root are gathered at a time.
        keeps: Take everything at wrap time and keep it: what does not live in slots has a buffer of its own.
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
    if keeps:
        storages = [storage if storage is WeightStorage.SLOT else WeightStorage.OWN for storage in storages]
    return WeightPlan(
        storages=tuple(storages),
        gathered_bytes=tuple(unit.gathered_bytes for unit in units),
        slots=slots,
        taken_at_once=keeps or allocator in DOUBLE_BUFFERS,
    )


_ROOT_STORAGE = {WeightAllocator.RESIZE: WeightStorage.RESIZED, WeightAllocator.SLOTS: WeightStorage.FOR_STEP}


class Use(Enum):
    """What a block of communication memory is for."""

    SHARD = "shard"  # what a rank sends of a group's compute weights; where these are whole, all of them
    SLOT = "slot"  # gathered weights of units that take turns
    UNIT = "unit"  # gathered weights of one unit
    ROOT_BUCKET = "root bucket"
    BUCKET = "bucket"
    SCRATCH = "scratch"  # what a pairwise exchange receives
    CROSSING = "crossing"  # what travels over the outer axis


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
    """Where every block lies in the one stretch that a pool takes at wrap time; the same on all ranks.

    Attributes:
        blocks: All blocks, in the order of their offsets.
        num_bytes: Bytes of the stretch.
    """

    blocks: tuple[PlannedBlock, ...]
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
    """Return the shape that most units share; of several the one with most bytes, then the first."""
    sizes = {unit.shape: unit.gathered_bytes for unit in units if unit.gathered_bytes}
    counts = Counter(unit.shape for unit in units if unit.gathered_bytes)
    return max(counts, key=lambda shape: (counts[shape], sizes[shape]), default=())


def prefetch_depth(numel: int, unit_numels: Sequence[int]) -> int:
    """Return the largest count such that any that many units fit into `numel` elements; at least 1 unless that is 0."""
    if numel < 0:
        raise ConfigurationError(f"{numel} elements cannot be gathered ahead; give 0 (none) or more.")
    count, total = 0, 0
    for size in sorted(unit_numels, reverse=True):
        total += size
        if total > numel:
            break
        count += 1
    return min(len(unit_numels), max(count, int(numel > 0)))
