"""Arenas and mailboxes of two ranks, both in this process: room, order, and everything that can go wrong."""

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistBackendError

from megatron_fsdp.buffer.futex import Bell, has_futex
from megatron_fsdp.buffer.mailbox import Mailboxes
from megatron_fsdp.buffer.shared_arena import (
    ARENA_BYTES,
    HEADER_BYTES,
    Arena,
    Place,
    Stretches,
    machine_of_process,
    make_arena,
    open_arena,
    started_at,
)

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")
SHORT = timedelta(seconds=0.05)


def make_pair(pids: tuple[int, int] | None = None) -> list[tuple[Mailboxes, Arena]]:
    """Two ranks, each with mappings of its own."""
    made = [make_arena() for _ in range(2)]
    places = [
        Place(machine_of_process(), os.getpid(), started_at(os.getpid()) or 0, descriptor) for descriptor, _ in made
    ]
    ranks = []
    for rank in range(2):
        arenas = {each: made[each][1] if each == rank else open_arena(places[each]) for each in range(2)}
        told = {each: replace(places[each], pid=pids[each]) if pids else places[each] for each in range(2)}
        ranks.append((Mailboxes(rank, arenas, told, SHORT), made[rank][1]))
    for descriptor, _ in made:
        os.close(descriptor)
    return ranks


def test_what_one_rank_writes_another_reads() -> None:
    (left, arena), (right, _) = make_pair()
    arena.view(HEADER_BYTES, 3, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    left.post(0, 1, 12, HEADER_BYTES)
    offset = right.read(0, 1, 0, (1, 12))
    assert offset == HEADER_BYTES
    assert right.is_posted(0, 1)
    assert not right.is_posted(1, 1)
    assert not right.is_posted(0, 2)


def test_messages_are_done_in_order_whatever_order_they_are_read_in() -> None:
    (left, _), (right, _) = make_pair()
    for number in (1, 2, 3):
        assert left.next_number(1) == number
        left.post(1, 2, 8, HEADER_BYTES)
    for number in (3, 2, 1):
        left.done(1, number)
    right.done(1, 2)
    assert [left.is_done(1, number) for number in (1, 2, 3)] == [False, False, False]
    right.done(1, 1)
    assert [left.is_done(1, number) for number in (1, 2, 3)] == [True, True, False]
    assert not left.is_done(0, 1)


def test_a_rank_that_does_not_come_is_named_after_the_time() -> None:
    (left, _), (_right, _) = make_pair()
    with pytest.raises(
        DistBackendError, match=r"Timed out after 0.05 s: rank 1 has not come to gather 1, which rank 0"
    ):
        left.read(0, 1, 1, (1, 4))
    with pytest.raises(DistBackendError, match=r"Timed out after 0.1 s"):
        left.read(0, 1, 1, (1, 4), timedelta(seconds=0.1))


def test_a_rank_that_has_gone_is_named_and_what_it_posted_is_read() -> None:
    (left, _), (right, _) = make_pair()
    right.post(0, 1, 4, HEADER_BYTES)
    right.leave()
    assert left.read(0, 1, 1, (1, 4)) == HEADER_BYTES
    with pytest.raises(DistBackendError, match=r"rank 1 has let go of its model before gather 2, which rank 0 waits"):
        left.read(0, 2, 1, (1, 4), timedelta(seconds=60))


def test_a_process_that_has_ended_is_named() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (left, _), _ = make_pair((os.getpid(), ended.pid))
    with pytest.raises(DistBackendError, match=rf"rank 1 \(process {ended.pid}\) has ended before reduction 1, which"):
        left.read(1, 1, 1, (1, 4), timedelta(seconds=60))


def test_what_is_left_of_a_process_and_a_later_one_are_not_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = started_at(child.pid)
    assert before is not None
    assert before > (started_at(os.getpid()) or 0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    assert started_at(child.pid) is None
    child.communicate()
    assert started_at(child.pid) is None


@pytest.mark.parametrize("other", [(1, 8), (2, 4)])
def test_ranks_that_differ_are_told_so(other: tuple[int, int]) -> None:
    (left, _), (right, _) = make_pair()
    right.post(0, *other, HEADER_BYTES)
    with pytest.raises(DistBackendError, match=r"ranks differ in gather 1: rank 0 takes part with 4 bytes .* rank 1"):
        left.read(0, 1, 1, (1, 4))


def test_more_messages_than_a_header_tells_of_are_refused_and_old_ones_forgotten() -> None:
    (left, _), (right, _) = make_pair()
    for _ in range(128):
        left.post(0, 1, 4, HEADER_BYTES)
    with pytest.raises(DistBackendError, match=r"128 collectives \(gather\) are under way"):
        left.post(0, 1, 4, HEADER_BYTES)
    right.done(0, 1)
    with pytest.raises(DistBackendError, match=r"128 collectives \(gather\) are under way"):
        left.post(0, 1, 4, HEADER_BYTES)
    left.done(0, 1)
    left.post(0, 1, 4, HEADER_BYTES + 64)
    assert right.read(0, 129, 0, (1, 4)) == HEADER_BYTES + 64
    assert right.read(0, 2, 0, (1, 4)) == HEADER_BYTES


def test_who_waits_is_woken() -> None:
    (left, _), (right, _) = make_pair()
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.append(left.read(0, 1, 1, (1, 4), timedelta(seconds=60))))
    reader.start()
    right.post(0, 1, 4, HEADER_BYTES)
    reader.join()
    assert found == [HEADER_BYTES]


def test_a_bell_that_was_rung_since_does_not_wait() -> None:
    word = ctypes.c_uint32()
    bell = Bell(ctypes.addressof(word))
    seen = bell.read()
    bell.ring()
    bell.wait(seen, 3600.0)
    assert bell.read() == seen + 1


def test_a_file_that_is_no_arena_is_refused() -> None:
    descriptor = os.memfd_create("other")
    try:
        with pytest.raises(OSError, match="is not an arena"):
            open_arena(Place((), os.getpid(), 0, descriptor))
    finally:
        os.close(descriptor)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * 4096)), max_size=40))
def test_stretches_in_use_never_meet_and_free_ones_are_used_again(steps: list[tuple[int, int]]) -> None:
    stretches = Stretches()
    in_use: dict[int, tuple[int, int]] = {}
    for number, (ended, num_bytes) in enumerate(steps):
        for done in sorted(in_use)[:ended]:
            del in_use[done]
        start = stretches.take(num_bytes, number, lambda other: other not in in_use)
        assert start >= HEADER_BYTES
        assert start + num_bytes <= HEADER_BYTES + stretches.taken_bytes
        assert all(start + num_bytes <= first or stop <= start for first, stop in in_use.values())
        in_use[number] = (start, start + num_bytes)


def test_stretches_stop_growing_and_end() -> None:
    stretches = Stretches()
    for number in range(100):
        stretches.take(5000, number, lambda other, number=number: other < number - 1)
    assert stretches.taken_bytes == 2 * 8192
    with pytest.raises(MemoryError, match="finds no room"):
        stretches.take(ARENA_BYTES, 100, lambda _: False)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:megatron_fsdp")


def test_an_arena_is_there_for_as_long_as_one_of_its_views() -> None:
    before = mapped()
    descriptor, arena = make_arena()
    os.close(descriptor)
    view = arena.view(HEADER_BYTES, 4, torch.float32)[1:3].fill_(2.0)
    assert arena.view(HEADER_BYTES, 4, torch.float32).tolist() == [0.0, 2.0, 2.0, 0.0]
    assert mapped() == before + 1
    del arena
    assert mapped() == before + 1
    assert view.tolist() == [2.0, 2.0]
    del view
    assert mapped() == before
