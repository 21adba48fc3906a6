"""Where tensors lie in a few large stretches of memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Place:
    """Where one tensor lies.

    Attributes:
        arena: The number of the stretch.
        offset: Of the first byte in it.
    """

    arena: int
    offset: int


def pack(sizes: Sequence[int], arena_bytes: int) -> tuple[list[Place], list[int]]:
    """Put tensors into arenas: largest first, each into the first arena that has room.

    Args:
        sizes: Bytes of each tensor.
        arena_bytes: Of a full arena; a larger tensor has an arena of its own.

    Returns:
        The place of each tensor, and the bytes that are used in each arena.
    """
    places = [Place(0, 0)] * len(sizes)
    used: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = -(-sizes[index] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        arena = next((number for number, bytes_ in enumerate(used) if bytes_ + size <= arena_bytes), len(used))
        if arena == len(used):
            used.append(0)
        places[index] = Place(arena, used[arena])
        used[arena] += size
    return places, used
