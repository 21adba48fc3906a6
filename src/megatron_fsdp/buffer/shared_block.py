"""A block of an arena: what is put into it can be read by other ranks where it lies."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_fsdp.buffer.pools import Block
from megatron_fsdp.buffer.shared_arena import PAGE_BYTES, Arena


class Messages(Protocol):
    """Those that tell other ranks to read blocks."""

    def is_done(self, number: int) -> bool:
        """Whether all ranks have read what the message of a number told of."""

    def await_done(self, number: int) -> None:
        """Wait until they have."""


class SharedBlock(Block):
    """As any block, but that it waits for its readers before its content may change.

    All ranks have to take and empty their blocks at the same points, before which each has read those of the others:
    who waits here waits for nobody who waits for him elsewhere.

    Args:
        num_bytes: Its size.
        arena: This rank's.
        offset_bytes: Where it lies there; nobody else takes that.
        messages: Tell who has read it.
    """

    def __init__(self, num_bytes: int, arena: Arena, offset_bytes: int, messages: Messages) -> None:
        super().__init__(num_bytes, torch.device("cpu"), arena.view(offset_bytes, num_bytes, torch.uint8))
        self.offset_bytes = offset_bytes
        self._arena = arena
        self._messages = messages
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
        self._await_readers()
        self._arena.give_back(self.offset_bytes, -(-self._held_bytes // PAGE_BYTES) * PAGE_BYTES)
        self._held_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """As above, once nobody reads what is there; it holds the most that it was asked for since it was empty.

        New pages cost more than what is done with them here, several times over.
        """
        self._await_readers()
        self._held_bytes = max(self._held_bytes, num_bytes)

    def poison(self) -> None:
        """As above; nothing happens while somebody reads it."""
        if self._messages.is_done(self._last_message):
            super().poison()

    def _await_readers(self) -> None:
        if self._last_message:
            self._messages.await_done(self._last_message)
            self._last_message = 0
