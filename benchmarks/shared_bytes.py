"""Let the profiler see what torch's allocator does not: blocks of memory that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from torch.profiler import record_function

from megatron_fsdp.shm.shared_block import SharedBlock

_EVENT = "[shared memory] "


@contextmanager
def blocks_seen() -> Iterator[None]:
    """Have every block note in the profile by how much what it holds changes."""

    def noting(method: Callable[..., None]) -> Callable[..., None]:
        def noted(block: SharedBlock, *arguments: int) -> None:
            before = block.held_bytes
            method(block, *arguments)
            if block.held_bytes != before:
                with record_function(f"{_EVENT}{block.held_bytes - before}"):
                    pass

        return noted

    hold, empty = noting(SharedBlock.hold), noting(SharedBlock.empty)
    with patch.object(SharedBlock, "hold", hold), patch.object(SharedBlock, "empty", empty):
        yield


def noted_bytes(event: str) -> int | None:
    """By how much a block has changed, if an event of a profile tells that."""
    return int(event.removeprefix(_EVENT)) if event.startswith(_EVENT) else None


def shared_ranges() -> list[range]:
    """Addresses of this process that lie in memory of the engine that ranks share."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    lines = (line.split() for line in maps.read_text().splitlines() if "memfd:megatron_fsdp" in line)
    bounds = (line[0].split("-") for line in lines)
    return [range(int(start, 16), int(stop, 16)) for start, stop in bounds]
