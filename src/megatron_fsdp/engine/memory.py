"""The memory of a model: flat buffers that stay, on the device or offloaded, and blocks that a step borrows.

Collectives read and write borrowed memory: slots for gathered weights, buckets and scratch for gradients. All of it
comes from one `CommunicationPool`: block by block when it is needed, or, where addresses have to stay, as one stretch
that is taken at wrap time and in which the same block lies at the same offset on every rank.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.engine.plans import PoolPlan, Use, WeightPlan, WeightStorage
from megatron_fsdp.sharding.placement import Layout, Region

# Note [Offloaded state]
#
# A flat buffer is on the device, or offloaded to host memory (`allocate`). An optimizer sees main weights and gradients
# where they are, and steps offloaded ones on the host. Copies between host and device run on two streams of their own,
# one for each direction:
#
#     sharded compute weights (host)  -> copied ->  their place in the full weights (device)  -> all-gathered, in place
#     reduced gradient (device)       -> copied ->  main gradient (host); added to what is there on the device
#     main weights (host)             -> copied, cast ->  compute weights
#
# The host may read and write offloaded memory at any time, so it waits for copies: for gradients when a backward ends,
# for weights when a forward or backward ends and when they are installed (`Executor.settle_offload`).


class FlatBuffer:
    """This rank's shards of all tensors of a layout, in one flat local tensor."""

    def __init__(self, layout: Layout, region: Region, local: torch.Tensor) -> None:
        self.layout = layout  # where each tensor lies in the full buffer
        self.region = region  # the elements of the full buffer that are here
        self.local = local  # these elements, (region.numel,)

    def view_of(self, region: Region) -> torch.Tensor:
        """Return the elements of a region inside of this one, a view (region.numel,)."""
        return self.local[region.within(self.region)]

    def local_shard(self, index: int) -> torch.Tensor:
        """Return the local shard of tensor `index`, a view, maybe empty.

        The full shape if the buffer is whole here; else (rows, *rest) or, where rows are cut, (elements,).
        """
        return shard_view(self.layout, self.region, self.local, index)

    def local_shards(self) -> list[torch.Tensor]:
        """Return the local shards of all tensors."""
        return [self.local[start:stop].view(shape) for start, stop, shape in self.layout.shards_in(self.region)]

    def store_all(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy this region's part of full tensors, casting to this buffer's dtype; skip those that are None."""
        shards, sources = [], []
        for index, (shard, tensor) in enumerate(zip(self.local_shards(), tensors, strict=True)):
            if tensor is None or not shard.numel():
                continue
            if not tensor.is_contiguous():  # flattening copies, so one at a time
                self.store(index, tensor)
                continue
            start, stop = self.layout.range_in(index, self.region)
            shards.append(shard.view(-1))
            sources.append(tensor.detach().view(-1)[start:stop])
        if shards:
            torch._foreach_copy_(shards, sources)

    def store(self, index: int, tensor: torch.Tensor) -> None:
        """Copy this region's part of a full tensor, casting to this buffer's dtype."""
        start, stop = self.layout.range_in(index, self.region)
        self.local_shard(index).view(-1).copy_(tensor.detach().reshape(-1)[start:stop])


def full_view(layout: Layout, full: torch.Tensor, index: int) -> torch.Tensor:
    """Return tensor `index`, in its own shape, as a view of a full flat buffer (numel,)."""
    start, stop, shape = layout.places[index]
    return full[start:stop].view(shape)


def shard_view(layout: Layout, region: Region, local: torch.Tensor, index: int) -> torch.Tensor:
    """Return the shard of tensor `index` in a region, as a view of the region's memory (region.numel,)."""
    start, stop, shape = layout.shards_in(region)[index]
    return local[start:stop].view(shape)


def padding_ranges(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return the ranges (start, stop) of the full buffer that belong to no tensor."""
    taken = sorted((start, stop) for start, stop, _ in layout.places if start < stop)
    bounds = [0, *chain.from_iterable(taken), layout.numel]
    return tuple((start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop)


def allocate(offloads: bool, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros (numel,) on the model's device, or offloaded: in host memory, which is pinned beside CUDA."""
    if offloads:
        return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")
    return torch.zeros(numel, dtype=dtype, device=device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on the device: the same one, or a copy that is complete when this returns."""
    return tensor if tensor.device == device else tensor.to(device)


Result = TypeVar("Result")


class Block:
    """A stretch of memory with typed views: allocated on `device`, or `memory`, (num_bytes,) of uint8, of a pool.

    It can be emptied and refilled, whole or in part: the memory is freed and allocated again, and views stay valid,
    since the storage object that they refer to is the same. Their content is lost. A block that is a part of a pool's
    memory keeps it: emptying and refilling it do nothing.
    """

    def __init__(self, num_bytes: int, device: torch.device, memory: torch.Tensor | None = None) -> None:
        self.is_persistent = memory is not None
        with torch.inference_mode(False):
            # `data`: writes into one part must not count as modifications of what autograd saved of another.
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device) if memory is None else memory.data
        self.storage = self._bytes.untyped_storage()._cdata  # the same for as long as the block lives
        self._start = self._bytes.storage_offset()
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Size in bytes, the most that it can hold."""
        return self._bytes.numel()

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now: its size, or 0 while it is empty."""
        return self.num_bytes if self.is_persistent else self._bytes.untyped_storage().nbytes()

    def empty(self) -> None:
        """Free the memory. Views must not be read until it is refilled."""
        if not self.is_persistent:
            # The storage object stays, so views of it become valid again with the next `hold`.
            self._bytes.untyped_storage().resize_(0)

    def hold(self, num_bytes: int) -> None:
        """Allocate memory for views that end at `num_bytes`; memory of that size stays as it is."""
        if self.held_bytes != num_bytes and not self.is_persistent:
            storage = self._bytes.untyped_storage()
            storage.resize_(0)  # else old and new memory would exist at a time, and the content would be copied
            storage.resize_(num_bytes)

    def poison(self) -> None:
        """Fill the memory, if it has any, with bytes of ones, which is NaN in every floating dtype."""
        if self.held_bytes:
            self._bytes[: self.held_bytes].fill_(0xFF)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is a view of this memory."""
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
    """Return the identity of a tensor's storage; None for a tensor without one of its own."""
    if tensor.layout is not torch.strided or isinstance(tensor, DTensor):
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # wrappers such as those of vmap have no storage
        return None


class CommunicationPool:
    """The owner of communication memory: hands out its blocks.

    `plan` has the persistent blocks, which are taken now in one stretch of zeros that `allocate` makes (None: on the
    device). Without a plan each block is allocated when it is made.
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
                allocate = allocate or (lambda count: torch.zeros(count, dtype=torch.uint8, device=device))
                self._memory = allocate(plan.num_bytes)

    def memory_of(self, use: Use, number: int) -> torch.Tensor | None:
        """Return the memory of a planned block, (num_bytes,) of uint8; None where there is no such block."""
        found = self._planned.get((use, number))
        if found is None:
            return None
        assert self._memory is not None
        return self._memory[found.offset : found.offset + found.num_bytes]

    def shard(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return zeros (numel,) for the shard that a rank sends of group `number`; None if the pool has none."""
        memory = self.memory_of(Use.SHARD, number)
        # `data`: whoever compares versions of these weights must not see what is written next to them.
        return None if memory is None else memory.view(dtype)[:numel].data

    def planned(self, use: Use, num_bytes: int) -> int:
        """Count the blocks of one use that are taken already and large enough."""
        return sum(block.use is use and block.num_bytes >= num_bytes for block in self._planned.values())

    def make(self, use: Use, number: int, num_bytes: int) -> Block:
        """Make a block, once for each number: the planned one if that is large enough, else one with its own memory."""
        memory = self.memory_of(use, number)
        if memory is None or memory.numel() < num_bytes:
            return Block(num_bytes, self._device)
        return Block(memory.numel(), self._device, memory)


class BlockPool:
    """A few blocks that are borrowed and given back, each as long as its borrower needs.

    `sizes_bytes` are those of all borrowers, and `modules` the number of modules of each, for `usual_size`. `make_room`
    waits for a reduction and gives its block back, or returns False where none is in flight.
    """

    def __init__(
        self,
        pool: CommunicationPool,
        use: Use,
        count: int,
        sizes_bytes: Sequence[int],
        make_room: Callable[[], object],
        *,
        modules: Sequence[int] = (),
    ) -> None:
        self._pool = pool
        self._use = use
        self._count = count
        self._num_bytes = num_bytes = max(sizes_bytes, default=0)
        self._usual_bytes = usual_size(sizes_bytes, modules or (1,) * len(sizes_bytes))
        self._make_room = make_room
        self._made = [pool.make(use, number, num_bytes) for number in range(pool.planned(use, num_bytes))]
        self._free = list(self._made)
        self.peak_bytes = self.held_bytes  # the most that was held at a time

    def borrow(self, num_bytes: int | None = None) -> Block:
        """Borrow a block; make room first where all, or too many bytes, are out."""
        needed = self._num_bytes if num_bytes is None else num_bytes
        # An embedding or a head, several times as large as a block, is counted by its bytes: it does not overlap with
        # its neighbour. Where nothing can be waited for the pool grows: several units that fill at once each need one.
        while self._is_full(needed) and self._make_room():
            pass  # also where the pool has grown beyond `count`, so that free blocks are left besides those lent
        if not self._free or len(self._made) < self._count:  # as many as planned, whenever others come back
            self._made.append(self._pool.make(self._use, len(self._made), self._num_bytes))
            self._free.insert(0, self._made[-1])
        block = self._free.pop(0)
        # A long one takes the memory of those that nobody uses now, which the next units take again.
        if needed > self._usual_bytes:
            for idle in self._free:
                idle.empty()
        block.hold(needed)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return block

    def _is_full(self, needed: int) -> bool:
        """Return True if `needed` bytes may be lent only when a block has come back."""
        out = [block for block in self._made if block not in self._free]
        if len(out) >= self._count:
            return True
        # Persistent memory is there, whoever borrows it.
        lent = sum(block.held_bytes for block in out if not block.is_persistent)
        return bool(lent) and lent + needed > self._count * self._usual_bytes

    def give_back(self, block: Block) -> None:
        """Give a borrowed block back; blocks that hold memory are lent again first.

        A longer one than usual, such as an embedding's, gives its memory back.
        """
        if self.is_long(block):
            block.empty()
        # Behind those with memory and before those without: an empty block would have to allocate.
        self._free.insert(sum(free.held_bytes > 0 for free in self._free), block)

    def is_long(self, block: Block) -> bool:
        """Return True if a block holds more than the usual size."""
        return not block.is_persistent and block.held_bytes > self._usual_bytes

    def set_count(self, count: int) -> None:
        """Change the number of blocks; drop free ones beyond it that are not persistent."""
        self._count = count
        while self._free and len(self._made) > count and not self._free[-1].is_persistent:
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


_PADDING_SHARE = 16


def usual_size(sizes: Sequence[int], modules: Sequence[int]) -> int:
    """Return the usual size of units: the largest of those that have the most common size for each of their modules.

    So merged units count as usual, whatever their number of modules. Sizes for each module may differ by padding, less
    than a sixteenth. Of several that are equally common the largest counts; 0 if there are no sizes.
    """
    each = [size // max(1, count) for size, count in zip(sizes, modules, strict=True)]
    counts = Counter(each)
    common = max(counts, key=lambda size: (counts[size], size), default=0)
    alike = (size for size, one in zip(sizes, each, strict=True) if abs(one - common) * _PADDING_SHARE <= common)
    return max(alike, default=0)


def weakly(method: Callable[[], Result]) -> Callable[[], Result | None]:
    """Call a bound method for as long as its object lives, after that return None."""
    # A bound method holds its object. See Note [Weak references] in `engine.py`.
    reference = weakref.WeakMethod(method)

    def call() -> Result | None:
        alive = reference()
        return None if alive is None else alive()

    return call


class WeightMemory:
    """The memory of gathered weights of one model."""

    def __init__(self, plan: WeightPlan, pool: CommunicationPool) -> None:
        self._plan = plan
        self._slot_bytes = plan.slot_bytes
        self._pool = pool
        self._blocks: dict[tuple[Use, int], Block] = {}  # slots and units with memory of their own, once they were used
        self._sizes: dict[tuple[Use, int], int] = {}  # bytes that each of them holds now
        self.held_bytes = 0  # their sum, kept since a model may have hundreds
        self.peak_bytes = 0  # the most that was held at a time
        if plan.taken_at_once:
            # At wrap time and in this order, so that addresses are the same in every step (CUDA graphs, registered
            # memory).
            for slot in range(plan.slots_used):
                self._hold((Use.SLOT, slot), self._slot_bytes, self._slot_bytes)
            for unit in plan.units_in(WeightStorage.OWN):
                self._hold((Use.UNIT, unit), plan.block_bytes[unit], plan.block_bytes[unit])

    def borrow(self, unit: int, slot: int | None) -> Block:
        """Return the block that a unit is unsharded into: that of a slot is always the same storage.

        A slot that is not taken when wrapping is as long as the unit in it: an embedding or a head may be several times
        as large as all others.
        """
        num_bytes = self._plan.block_bytes[unit]
        if self._plan.storages[unit] is not WeightStorage.SLOT:
            return self._hold((Use.UNIT, unit), num_bytes, num_bytes)
        assert slot is not None
        # See Note [Slots and saved views] in `schedule.py`.
        needed = self._slot_bytes if self._plan.taken_at_once else num_bytes
        return self._hold((Use.SLOT, slot), self._slot_bytes, needed)

    def give_back(self, unit: int, slot: int | None = None) -> bool:
        """Release a unit's own block or, where one is given, free that of a slot; return True if memory was freed."""
        key = (Use.UNIT, unit) if slot is None else (Use.SLOT, slot)
        block = self._blocks.get(key)
        keeps = slot is None and self._plan.storages[unit] not in (WeightStorage.RESIZED, WeightStorage.FOR_STEP)
        if block is None or keeps:
            return False
        block.empty()
        self._note(key, block)
        return True

    def empty(self) -> bool:
        """Free all blocks, whose units are resharded; return False if memory is kept since its address has to stay."""
        if self._plan.taken_at_once:
            return False
        for key, block in self._blocks.items():
            block.empty()
            self._note(key, block)
        return True

    def _hold(self, key: tuple[Use, int], num_bytes: int, needed: int) -> Block:
        """Return a block that was made with `num_bytes`, once, and holds as many as are needed."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = self._pool.make(*key, num_bytes)
        block.hold(needed)
        self._note(key, block)
        return block

    def _note(self, key: tuple[Use, int], block: Block) -> None:
        held = block.held_bytes
        self.held_bytes += held - self._sizes.get(key, 0)
        self._sizes[key] = held
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
