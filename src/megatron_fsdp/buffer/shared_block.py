"""A block of an arena: what is put into it can be read by other ranks where it lies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_fsdp.buffer.pools import Block
from megatron_fsdp.buffer.shared_arena import PAGE_BYTES, Arena


class SharedBlock(Block):
    """As any block, but that it waits for its readers before its content may change.

    Args:
        num_bytes: Its size.
        arena: This rank's.
        offset_bytes: Where it lies there; nobody else takes that.
        await_readers: Waits until all ranks are done with the message of a number.
    """

    def __init__(self, num_bytes: int, arena: Arena, offset_bytes: int, await_readers: Callable[[int], None]) -> None:
        super().__init__(num_bytes, torch.device("cpu"), arena.view(offset_bytes, num_bytes, torch.uint8))
        self.offset_bytes = offset_bytes
        self._arena = arena
        self._await_readers = await_readers
        self._held_bytes = 0
        self._last_message = 0  # there is none of that number

    def is_at(self, offset_bytes: int) -> bool:
        """Whether a place in the arena is in this block."""
        return self.offset_bytes <= offset_bytes < self.offset_bytes + max(1, self.num_bytes)

    def is_read_as(self, number: int) -> None:
        """Other ranks will read it for a message; numbers grow."""
        self._last_message = number

    @property
    def held_bytes(self) -> int:
        """As above; pages come as they are written."""
        return self._held_bytes

    def empty(self) -> None:
        """As above, once nobody reads it any more."""
        self._shrink(0)

    def hold(self, num_bytes: int) -> None:
        """As above, once nobody reads what is there; views are good in any case."""
        self._shrink(num_bytes)
        self._held_bytes = num_bytes

    def _shrink(self, num_bytes: int) -> None:
        if self._last_message:
            self._await_readers(self._last_message)
            self._last_message = 0
        first = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if first < self._held_bytes:
            self._arena.give_back(self.offset_bytes + first, -(-self._held_bytes // PAGE_BYTES) * PAGE_BYTES - first)
        self._held_bytes = min(self._held_bytes, num_bytes)
