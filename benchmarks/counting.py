"""Exact counts of a block's collectives and file operations, in all threads of this process."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass
class Counts:
    """The counts of one rank."""

    collectives: int = 0  # of all process groups, those that torch makes to send one object counted one by one
    object_bytes: int = 0  # pickled to be sent, by this rank
    opened: int = 0  # files opened through `pathlib` or `io`
    read_bytes: int = 0  # from these files; what buffering reads ahead is included
    written_bytes: int = 0  # to these files
    synced: int = 0  # files and folders forced to the disk


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count operations inside the block; collectives are counted when it ends."""
    counts = Counts()
    before = collectives_by_group()
    patches = (
        mock.patch.object(io, "open", _counting_open(counts)),
        mock.patch.object(os, "fsync", _counting_sync(counts, os.fsync)),
        mock.patch.object(
            distributed_c10d, "_object_to_tensor", _counting_pickles(counts, distributed_c10d._object_to_tensor)
        ),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield counts
    counts.collectives = sum(after - before.get(group, 0) for group, after in collectives_by_group().items())


def collectives_by_group() -> dict[dist.ProcessGroup, int]:
    """Return the number of collectives of each process group so far."""
    groups = distributed_c10d._world.pg_map if dist.is_initialized() else {}
    return {group: group._get_sequence_number_for_group() for group in groups}  # type: ignore[attr-defined]


def _counting_open(counts: Counts) -> Callable[..., Any]:
    class File(io.FileIO):
        """An unbuffered file, which counts calls of the system."""

        def readinto(self, buffer: Any, /) -> Any:
            found = super().readinto(buffer)
            counts.read_bytes += found or 0
            return found

        def readall(self) -> Any:
            found = super().readall()
            counts.read_bytes += len(found or b"")
            return found

        def write(self, data: Any, /) -> Any:
            found = super().write(data)
            counts.written_bytes += found or 0
            return found

    def opened(path: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **kwargs: Any) -> Any:
        counts.opened += 1
        plain = mode.replace("b", "").replace("t", "")
        raw = File(path, plain)
        size = io.DEFAULT_BUFFER_SIZE if buffering < 2 else buffering
        if buffering == 0:
            return raw
        stream: Any = io.BufferedReader(raw, size) if plain == "r" else io.BufferedWriter(raw, size)
        return stream if "b" in mode else io.TextIOWrapper(stream, encoding or "utf-8", *rest, **kwargs)

    return opened


def _counting_sync(counts: Counts, sync: Callable[[int], None]) -> Callable[[int], None]:
    def counted(descriptor: int) -> None:
        counts.synced += 1
        sync(descriptor)

    return counted


def _counting_pickles(counts: Counts, pickled: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        found = pickled(*args, **kwargs)
        counts.object_bytes += found[0].numel()
        return found

    return counted
