"""Memory that the processes of one machine share: each rank has an arena that it writes and the others read.

An arena is an anonymous file in memory (`memfd_create`) as large as could ever be needed, of which only what was
written takes memory. The others open it through `/proc`, and all close the file once everybody has mapped it: nothing
is left behind however a rank ends, and what a rank has written stays readable for the others after its end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEADER_BYTES = 1 << 19
ARENA_BYTES = 1 << 36
OWN_BYTES = ARENA_BYTES // 2
"""The end of an arena, of which only its rank takes memory. What is before is for what all ranks take alike."""
PAGE_BYTES = 4096
_TOKEN = 16
"""Word of the header that proves whose arena this is; a cache line of its own, beside those of the mailboxes."""
_REMOVE, _DONT_DUMP = 9, 16
"""Of `madvise`."""


@dataclass(frozen=True)
class Place:
    """Where a process is, and how to find the arena that it made; travels between ranks.

    Attributes:
        machine: The same for processes that can share memory and that count as one host.
        pid: Of the process.
        started: When it was, in ticks; tells it from a later one with the same number.
        descriptor: Of the open file.
        rank: What to call it in messages: its rank among all.
        token: What the header of the arena holds; drawn at random for each arena.
    """

    machine: tuple[str, ...]
    pid: int
    started: int
    descriptor: int
    rank: int
    token: int


def machine_of_process() -> tuple[str, ...]:
    """What tells hosts apart: this boot of a kernel, and what processes and networks can be seen from here.

    Raises:
        OSError: The system does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, str(Path("/proc/self/ns/pid").readlink()), str(Path("/proc/self/ns/net").readlink())


def started_at(pid: int) -> int | None:
    """When a process was started, in ticks since boot; None where there is none, or only what is left of it.

    Raises:
        OSError: The system does not say.
    """
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = told.rpartition(")")[2].split()  # behind the name, which may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def has_ended(place: Place) -> bool:
    """Whether a process is known to have ended; not where this one may open no file to find out."""
    try:
        return started_at(place.pid) != place.started
    except OSError:
        return False


class _Mapping:
    """A whole arena as memory of this process; a file of Python's own `mmap` would keep a descriptor open."""

    def __init__(self, path: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != ARENA_BYTES:
                raise OSError(f"{path} is not an arena")
            how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, ctypes.c_long(0)
            address = self._libc.mmap(None, ctypes.c_size_t(ARENA_BYTES), *how)
        finally:
            os.close(descriptor)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap: " + os.strerror(ctypes.get_errno()))
        self.address: int = address
        # A dump of the core would go through all of it, and write zeros where it cannot skip.
        self._libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(ARENA_BYTES), _DONT_DUMP)

    def give_back(self, offset_bytes: int, num_bytes: int) -> None:
        """Let memory go; it is zero where it is used again."""
        address = ctypes.c_void_p(self.address + offset_bytes)
        if num_bytes and self._libc.madvise(address, ctypes.c_size_t(num_bytes), _REMOVE):
            raise OSError(ctypes.get_errno(), "madvise: " + os.strerror(ctypes.get_errno()))

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(ARENA_BYTES))


class Arena:
    """One rank's arena, as this process sees it.

    Args:
        path: Of the open file; it may be closed afterwards.

    Attributes:
        words: Its header as 64-bit words.

    Raises:
        OSError: It is no arena, or cannot be mapped.
    """

    def __init__(self, path: str) -> None:
        self._mapping = _Mapping(path)
        self.words = (ctypes.c_int64 * (HEADER_BYTES // 8)).from_address(self._mapping.address)
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    @property
    def token(self) -> int:
        """What `Place.token` is compared with."""
        return self.words[_TOKEN]

    def offset_of(self, address: int) -> int | None:
        """How far behind the start of the arena an address lies; None for one that is not in it."""
        offset = address - self._mapping.address
        return offset if 0 <= offset < ARENA_BYTES else None

    def give_back(self, offset_bytes: int, num_bytes: int) -> None:
        """Let the memory of whole pages go. Views stay valid, and read zeros.

        Raises:
            OSError: The system refuses.
        """
        self._mapping.give_back(offset_bytes, num_bytes)

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements from `offset_bytes` on; the same tensor every time. It keeps the memory."""
        key = offset_bytes, numel, dtype
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._make(offset_bytes, numel, dtype)
        return view

    def _make(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            if numel == 0:
                return torch.empty(0, dtype=dtype, device="cpu")
            memory = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(self._mapping.address + offset_bytes)
            memory.mapping = self._mapping  # type: ignore[attr-defined]  # so that it lives as long as this
            return torch.frombuffer(memory, dtype=dtype)


def make_arena() -> tuple[int, Arena]:
    """Make this rank's arena; returns the file, for the others to open, and the arena.

    Raises:
        OSError: The system refuses.
    """
    descriptor = os.memfd_create("megatron_fsdp", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, ARENA_BYTES)
        arena = Arena(_path(os.getpid(), descriptor))
        arena.words[_TOKEN] = secrets.randbits(63)
        return descriptor, arena
    except BaseException:
        os.close(descriptor)
        raise


def open_arena(place: Place) -> Arena:
    """Map the arena of another process, and no other one.

    Machines that were cloned from one image may report the same boot, namespaces and process ids. What is found there
    is then an arena, but this rank's own.

    Raises:
        OSError: It is gone, may not be opened, or is not the one that was made there.
    """
    arena = Arena(_path(place.pid, place.descriptor))
    if arena.token != place.token or has_ended(place):
        raise OSError(f"process {place.pid} as seen from here is not rank {place.rank}")
    return arena


def _path(pid: int, descriptor: int) -> str:
    return f"/proc/{pid}/fd/{descriptor}"


class Room:
    """Takes stretches of addresses, one after another (pure).

    Args:
        start: Where the first lies, in bytes.
        stop: Where there are no more.

    Attributes:
        taken_bytes: What all stretches take.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self.taken_bytes = 0

    def take(self, num_bytes: int) -> tuple[int, int]:
        """A new stretch of whole pages: where it begins, and its length in bytes.

        Raises:
            MemoryError: There is no room left.
        """
        length = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
        offset = self._start + self.taken_bytes
        if offset + length > self._stop:
            raise MemoryError(f"{num_bytes} bytes find no room in shared memory; set MFSDP_SHARED_MEMORY=0")
        self.taken_bytes += length
        return offset, length


class Stretches:
    """Which parts of an arena are in use, and until when (pure).

    A stretch is taken for one message, and free again when every reader is done with that.

    Args:
        room: Where they come from.

    Attributes:
        taken_bytes: What all stretches take; it grows until there is one for each message that can be under way.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._stretches: list[_Stretch] = []
        self.taken_bytes = 0

    def take(self, num_bytes: int, number: Any, is_done: Any) -> int:
        """Find room for a message.

        Args:
            num_bytes: Its length.
            number: The message's own.
            is_done: Whether all readers are done with the message of a number.

        Returns:
            The offset in the arena, in bytes.

        Raises:
            MemoryError: The arena has no room left.
        """
        fitting = (each for each in self._stretches if num_bytes <= each.num_bytes <= 2 * num_bytes + PAGE_BYTES)
        for stretch in fitting:
            if is_done(stretch.number):
                stretch.number = number
                return stretch.offset
        offset, length = self._room.take(num_bytes)
        self._stretches.append(_Stretch(offset, length, number))
        self.taken_bytes += length
        return offset


@dataclass
class _Stretch:
    offset: int
    num_bytes: int
    number: Any
