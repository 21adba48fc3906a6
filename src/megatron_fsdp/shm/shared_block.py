"""A block of an arena: what is put into it can be read by other ranks where it lies."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_fsdp.engine.pools import Block
from megatron_fsdp.shm.shared_arena import PAGE_BYTES, Arena, Room


class Messages(Protocol):
    """Those that tell other ranks to read blocks."""

    def is_done(self, number: int) -> bool:
        """Whether all ranks have read what the message of a number told of."""

    def await_done(self, number: int) -> None:
        """Wait until they have."""


@dataclass
class Stretch:
    """Where a block lies; others may read from there when the block is gone.

    Attributes:
        offset_bytes: In the arena.
        num_bytes: Whole pages.
        held_bytes: From its beginning, that take memory.
        last_message: What told the others last to read it; there is none of number 0.
    """

    offset_bytes: int
    num_bytes: int
    held_bytes: int = 0
    last_message: int = 0

    def empty(self, arena: Arena) -> None:
        """Give its memory back; nobody may read it any more."""
        arena.give_back(self.offset_bytes, -(-self.held_bytes // PAGE_BYTES) * PAGE_BYTES)
        self.held_bytes = 0


class SharedBlock(Block):
    """As any block, but that it waits for its readers before its content may change.

    All ranks have to take and empty their blocks at the same points, before which each has read those of the others:
    who waits here waits for nobody who waits for him elsewhere.

    Args:
        num_bytes: Its size.
        arena: This rank's.
        stretch: Where it lies there, with room for it; no other block does.
        messages: Tell who has read it.
    """

    def __init__(self, num_bytes: int, arena: Arena, stretch: Stretch, messages: Messages) -> None:
        super().__init__(num_bytes, torch.device("cpu"), arena.view(stretch.offset_bytes, num_bytes, torch.uint8))
        self._arena = arena
        self._stretch = stretch
        self._messages = messages

    def is_at(self, offset_bytes: int) -> bool:
        """Whether a place in the arena is in this block."""
        return 0 <= offset_bytes - self._stretch.offset_bytes < max(1, self.num_bytes)

    def is_read_as(self, number: int) -> None:
        """Other ranks will read it for a message; numbers grow."""
        self._stretch.last_message = number

    @property
    def held_bytes(self) -> int:
        """As above; pages come as they are written."""
        return self._stretch.held_bytes

    def empty(self) -> None:
        """As above, once nobody reads it any more."""
        self._await_readers()
        self._stretch.empty(self._arena)

    def hold(self, num_bytes: int) -> None:
        """As above, once nobody reads what is there; it holds the most that it was asked for since it was empty.

        New pages cost more than what is done with them here, several times over.
        """
        self._await_readers()
        self._stretch.held_bytes = max(self._stretch.held_bytes, num_bytes)

    def poison(self) -> None:
        """As above; nothing happens while somebody reads it."""
        if self._messages.is_done(self._stretch.last_message):
            super().poison()

    def _await_readers(self) -> None:
        if self._stretch.last_message:
            self._messages.await_done(self._stretch.last_message)
            self._stretch.last_message = 0


class Blocks:
    """The blocks of an arena. What those take that are gone is given back, and their room to others.

    Args:
        arena: This rank's.
        room: Where they lie.
        messages: Tell who has read them.
    """

    def __init__(self, arena: Arena, room: Room, messages: Messages) -> None:
        self._arena = arena
        self._room = room
        self._messages = messages
        self._lent: list[tuple[weakref.ref[SharedBlock], Stretch]] = []
        self._free: list[Stretch] = []

    def make(self, num_bytes: int) -> SharedBlock:
        """A new one, empty.

        Raises:
            MemoryError: There is no room left.
        """
        self._take_back()
        fitting = [stretch for stretch in self._free if stretch.num_bytes >= num_bytes]
        if fitting:
            stretch = min(fitting, key=lambda each: each.num_bytes)
            self._free = [each for each in self._free if each is not stretch]
        else:
            stretch = Stretch(*self._room.take(num_bytes))
        block = SharedBlock(num_bytes, self._arena, stretch, self._messages)
        self._lent.append((weakref.ref(block), stretch))
        return block

    def at(self, offset_bytes: int) -> SharedBlock | None:
        """The block that a place in the arena is in."""
        blocks = (reference() for reference, _ in self._lent)
        return next((block for block in blocks if block is not None and block.is_at(offset_bytes)), None)

    @property
    def held_bytes(self) -> int:
        """What they take, with those that are gone and may still be read."""
        return sum(stretch.held_bytes for _, stretch in self._lent)

    def _take_back(self) -> None:
        lent, self._lent = self._lent, []
        for reference, stretch in lent:
            if reference() is None and self._messages.is_done(stretch.last_message):
                stretch.empty(self._arena)
                stretch.last_message = 0
                self._free.append(stretch)
            else:
                self._lent.append((reference, stretch))
