"""Collectives through memory that all ranks of an axis share: no socket, no thread, no copy where there need be none.

Sockets of one machine cost two copies through the kernel and the threads of a back end. Here a rank says where its part
lies when the collective is launched, and goes on; when it waits, it reads the parts of the others from where they lie
straight to where they belong, or adds them up from there, in rank order as `sum_received` does. What is launched needs
nothing more of the rank that launched it, as with a back end that has threads of its own.

    weights    that were taken as `whole`: each rank's part is in its place for all, and a gather copies nothing
    buckets    that are a `block`: others read them where they are, and the block is used again when all have
    the rest   is copied into the arena first
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from megatron_fsdp.comm.local_sums import add_up
from megatron_fsdp.comm.real_values import address_of
from megatron_fsdp.shm.mailbox import Kind, Mailboxes
from megatron_fsdp.shm.shared_arena import ARENA_BYTES, HEADER_BYTES, OWN_BYTES, Arena, Room, Stretches
from megatron_fsdp.shm.shared_block import Blocks, SharedBlock
from megatron_fsdp.shm.shared_work import SharedSum, SharedWork

_GATHERS, _REDUCTIONS = 0, 1


class SharedMemory:
    """The arenas of all ranks of an axis.

    Args:
        rank: This rank's position.
        arenas: One per rank, in rank order.
        boxes: Their headers.
    """

    def __init__(self, rank: int, arenas: Sequence[Arena], boxes: Mailboxes) -> None:
        self._rank = rank
        self._arenas = tuple(arenas)
        self._boxes = boxes
        self._own_room = Room(ARENA_BYTES - OWN_BYTES, ARENA_BYTES)
        self._whole_room = Room(HEADER_BYTES, ARENA_BYTES - OWN_BYTES)
        self._whole_bytes = 0
        self._stretches = Stretches(self._own_room)
        self._blocks = Blocks(self._arenas[rank], self._own_room, _Reductions(boxes))
        ranks = range(len(arenas))
        self._others = (*ranks[rank + 1 :], *ranks[:rank])  # not all from the same rank at first

    @property
    def copied_bytes(self) -> int:
        """What this rank has taken for copies of what it sends."""
        return self._stretches.taken_bytes

    @property
    def held_bytes(self) -> int:
        """What this rank has taken in all: that, its part of `whole` tensors, and what its blocks hold now."""
        return self.copied_bytes + self._whole_bytes + self._blocks.held_bytes

    # ---- memory -------------------------------------------------------------------------------------------------

    def whole(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor (numel,) that is the same memory on all ranks, of zeros; by all ranks, in the same order.

        A rank may write its own part of `numel / num_ranks` elements while no other reads that: from the end of a pass
        (`end_pass`) to the next `begin_pass`, or gather.

        Raises:
            MemoryError: There is no room left.
        """
        num_bytes = numel * dtype.itemsize
        offset, _ = self._whole_room.take(num_bytes)
        self._whole_bytes += num_bytes // len(self._arenas)
        return self._arenas[0].view(offset, numel, dtype)

    def part_of(self, whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Elements of a `whole` tensor as one with a storage of its own, which is saved and copied alone."""
        offset = self._arenas[0].offset_of(address_of(whole))
        assert offset is not None
        return self._arenas[0].view(offset + start * whole.itemsize, stop - start, whole.dtype)

    def block(self, num_bytes: int) -> SharedBlock:
        """A block of this rank's arena.

        Raises:
            MemoryError: There is no room left.
        """
        return self._blocks.make(num_bytes)

    def _block_of(self, tensor: torch.Tensor) -> SharedBlock | None:
        """The block that a tensor is part of."""
        offset = self._arenas[self._rank].offset_of(address_of(tensor))
        return None if offset is None else self._blocks.at(offset)

    # ---- collectives --------------------------------------------------------------------------------------------

    def begin_pass(self, steps: int) -> SharedWork:
        """Start agreeing that each rank's own weights are up to date; when it is done, all may be read.

        Args:
            steps: How often the weights were updated; ranks that differ in that fail.
        """
        return self._agree(Kind.BEGINNING_OF_A_PASS, steps)

    def end_pass(self) -> SharedWork:
        """Start agreeing that nobody reads weights any more; when it is done, each rank may change its own."""
        return self._agree(Kind.END_OF_A_PASS, 0)

    def meet(self) -> list[SharedWork]:
        """Start meeting all ranks for a change; one that goes on as before is met by its next gather or reduction."""
        return [self._agree(Kind.CHANGE_OF_REQUIRES_GRAD, 0, channel) for channel in (_GATHERS, _REDUCTIONS)]

    def _agree(self, kind: Kind, count: int, channel: int = _GATHERS) -> SharedWork:
        """Post a message without content but a number of bytes or steps, to be waited for."""
        number = self._boxes.next_number(channel)
        expected = kind, count
        self._boxes.post(channel, *expected, 0)

        def read(timeout: timedelta | None) -> None:
            for other in self._others:
                self._boxes.read(channel, number, other, expected, timeout)

        return SharedWork(self._boxes, channel, number, read)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> SharedWork:
        """Start gathering; as `Axis.all_gather`."""
        numel, dtype = shard.numel(), shard.dtype
        if self._is_whole(full):
            return self._agree(Kind.GATHER, shard.nbytes)
        number, mine, offset = self._take(_GATHERS, numel, dtype)
        mine.copy_(shard)
        expected = Kind.GATHER, shard.nbytes
        self._boxes.post(_GATHERS, *expected, offset)
        if address_of(full) + self._rank * shard.nbytes != address_of(shard):
            full[self._rank * numel : (self._rank + 1) * numel].copy_(shard)

        def read(timeout: timedelta | None) -> None:
            for other in self._others:
                theirs = self._part(_GATHERS, number, other, expected, (0, numel, dtype), timeout)
                full[other * numel : (other + 1) * numel].copy_(theirs)

        return SharedWork(self._boxes, _GATHERS, number, read)

    def reduce_scatter(self, full: torch.Tensor) -> SharedSum:
        """Start summing `full` over the ranks, in rank order, 16-bit values in float32.

        Args:
            full: (num_ranks * shard_numel,); it must stay as it is until the sum was taken.

        Returns:
            The work; once it was waited for it gives this rank's part of the sum, (shard_numel,).
        """
        numel = full.numel() // len(self._arenas)
        number, mine, offset = self._lay_out(full)
        expected = Kind.REDUCE_SCATTER, full.nbytes
        self._boxes.post(_REDUCTIONS, *expected, offset)
        part = slice(self._rank * numel, (self._rank + 1) * numel)

        def read(timeout: timedelta | None) -> list[torch.Tensor]:
            return self._rows(number, full[part], expected, (self._rank * numel, numel, full.dtype), timeout)

        return SharedSum(self._boxes, _REDUCTIONS, number, read, mine[part])

    def all_reduce(self, full: torch.Tensor, average: bool) -> SharedWork:
        """Start summing or averaging `full` over the ranks, in place; each adds up all of it, all in the same order."""
        numel, dtype = full.numel(), full.dtype
        number, mine, offset = self._take(_REDUCTIONS, numel, dtype)
        mine.copy_(full)
        expected = Kind.ALL_REDUCE, full.nbytes
        self._boxes.post(_REDUCTIONS, *expected, offset)

        def read(timeout: timedelta | None) -> None:
            total = add_up(self._rows(number, mine, expected, (0, numel, dtype), timeout), full)
            if average:  # before it is rounded to 16 bits, which may not hold the sum
                total.div_(len(self._arenas))
            if total is not full:
                full.copy_(total)

        return SharedWork(self._boxes, _REDUCTIONS, number, read)

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        offset = self._arenas[0].offset_of(address_of(tensor))
        return offset is not None and offset < ARENA_BYTES - OWN_BYTES

    def _lay_out(self, full: torch.Tensor) -> tuple[int, torch.Tensor, int]:
        """Number of the next reduction, and `full` where others can read all but this rank's own part."""
        block = self._block_of(full)
        if block is not None:
            number = self._boxes.next_number(_REDUCTIONS)
            block.is_read_as(number)
            offset = self._arenas[self._rank].offset_of(address_of(full))
            assert offset is not None
            return number, full, offset
        number, mine, offset = self._take(_REDUCTIONS, full.numel(), full.dtype)
        numel = full.numel() // len(self._arenas)
        for start, stop in ((0, self._rank * numel), ((self._rank + 1) * numel, full.numel())):
            if start < stop:
                mine[start:stop].copy_(full[start:stop])
        return number, mine, offset

    def _take(self, channel: int, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor, int]:
        """Number of the next message, room for it, and where that is."""
        number = self._boxes.next_number(channel)
        offset = self._stretches.take(numel * dtype.itemsize, (channel, number), self._is_done)
        return number, self._arenas[self._rank].view(offset, numel, dtype), offset

    def _is_done(self, message: tuple[int, int]) -> bool:
        return self._boxes.is_done(*message)

    def _part(
        self,
        channel: int,
        number: int,
        sender: int,
        expected: tuple[int, int],
        part: tuple[int, int, torch.dtype],
        timeout: timedelta | None,
    ) -> torch.Tensor:
        """Elements `part` (first, count, dtype) of what a rank has posted, where they lie."""
        offset = self._boxes.read(channel, number, sender, expected, timeout)
        first, numel, dtype = part
        return self._arenas[sender].view(offset + first * dtype.itemsize, numel, dtype)

    def _rows(
        self,
        number: int,
        own: torch.Tensor,
        expected: tuple[int, int],
        part: tuple[int, int, torch.dtype],
        timeout: timedelta | None,
    ) -> list[torch.Tensor]:
        """The same part of what each rank has posted, in rank order."""
        return [
            own if rank == self._rank else self._part(_REDUCTIONS, number, rank, expected, part, timeout)
            for rank in range(len(self._arenas))
        ]


class _Reductions(NamedTuple):
    """The messages of reductions."""

    boxes: Mailboxes

    def is_done(self, number: int) -> bool:
        return self.boxes.is_done(_REDUCTIONS, number)

    def await_done(self, number: int) -> None:
        self.boxes.await_done(_REDUCTIONS, number)
