"""Arenas and mailboxes of two ranks, both in this process: room, order, and everything that can go wrong."""

import ctypes
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistBackendError

from megatron_fsdp.shm.futex import Bell, has_futex
from megatron_fsdp.shm.mailbox import _RING as RING
from megatron_fsdp.shm.mailbox import Mailboxes
from megatron_fsdp.shm.shared_arena import (
    ARENA_BYTES,
    HEADER_BYTES,
    Arena,
    Place,
    Room,
    Stretches,
    has_ended,
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
        Place(machine_of_process(), os.getpid(), started_at(os.getpid()) or 0, descriptor, rank, arena.token)
        for rank, (descriptor, arena) in enumerate(made)
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


def test_who_waits_a_shorter_time_than_others_allow_may_wait_again() -> None:
    (left, _), (right, _) = make_pair()
    with pytest.raises(DistBackendError, match=r"Timed out after 0.01 s: rank 1 has not come to gather 1"):
        left.read(0, 1, 1, (1, 4), timedelta(seconds=0.01))
    right.post(0, 1, 4, HEADER_BYTES)
    assert left.read(0, 1, 1, (1, 4)) == HEADER_BYTES


def test_a_failure_is_final_and_the_others_learn_because_of_whom() -> None:
    (left, _), (right, _) = make_pair()
    with pytest.raises(DistBackendError, match="Timed out"):
        left.read(1, 1, 1, (1, 4))
    right.post(1, 1, 4, HEADER_BYTES)  # too late
    with pytest.raises(DistBackendError, match=r"has failed before: Timed out after 0.05 s: rank 1 has not come to"):
        left.next_number(0)
    with pytest.raises(DistBackendError, match=r"has failed before: Timed out after 0.05 s: rank 1 has not come to"):
        left.read(0, 1, 1, (1, 4))
    left.leave()
    with pytest.raises(DistBackendError, match="rank 0 has failed, because of rank 1, and has not come to reduction 1"):
        right.read(1, 1, 0, (1, 4))


def test_a_rank_that_has_gone_is_named_and_what_it_posted_is_read() -> None:
    (left, _), (right, _) = make_pair()
    right.post(0, 1, 4, HEADER_BYTES)
    right.leave()
    assert left.read(0, 1, 1, (1, 4)) == HEADER_BYTES
    with pytest.raises(
        DistBackendError, match=r"rank 1 has let go of its model and has not come to gather 2, which rank 0"
    ):
        left.read(0, 2, 1, (1, 4), timedelta(seconds=60))


def test_a_process_that_has_ended_is_named() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (left, _), _ = make_pair((os.getpid(), ended.pid))
    with pytest.raises(
        DistBackendError, match=rf"rank 1 \(process {ended.pid}\) has ended and has not come to reduction 1, which"
    ):
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


def test_a_process_that_cannot_open_a_file_takes_nobody_for_dead() -> None:
    here = Place((), os.getpid(), started_at(os.getpid()) or 0, 0, 0, 0)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not has_ended(here)
    assert has_ended(replace(here, started=here.started + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    try:
        assert not has_ended(here)
        with pytest.raises(OSError, match="Too many open files"):
            started_at(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize("other", [(1, 8), (2, 4)])
def test_ranks_that_differ_are_told_so(other: tuple[int, int]) -> None:
    (left, _), (right, _) = make_pair()
    right.post(0, *other, HEADER_BYTES)
    with pytest.raises(DistBackendError, match=r"ranks differ in gather 1: rank 0 takes part with 4 bytes .* rank 1"):
        left.read(0, 1, 1, (1, 4))


def test_more_messages_than_a_header_tells_of_are_refused_and_old_ones_forgotten() -> None:
    (left, _), (right, _) = make_pair()
    for _ in range(RING):
        left.post(0, 1, 4, HEADER_BYTES)
    right.done(0, 1)
    with pytest.raises(
        DistBackendError, match=rf"{RING} collectives \(gather\) are under way in shared memory and this"
    ):
        left.post(0, 1, 4, HEADER_BYTES)
    left.done(0, 1)
    left.post(0, 1, 4, HEADER_BYTES + 64)
    assert right.read(0, RING + 1, 0, (1, 4)) == HEADER_BYTES + 64
    assert right.read(0, 2, 0, (1, 4)) == HEADER_BYTES


def test_who_is_a_whole_header_ahead_waits_for_the_others() -> None:
    (left, _), (right, _) = make_pair()
    for number in range(RING):
        left.post(0, 1, 4, HEADER_BYTES)
        left.done(0, number + 1)
    late = threading.Timer(0.02, right.done, (0, 1))
    late.start()
    left.post(0, 1, 4, HEADER_BYTES + 64)
    assert left.next_number(0) == RING + 2
    assert right.read(0, RING + 1, 0, (1, 4)) == HEADER_BYTES + 64
    late.join()
    with pytest.raises(
        DistBackendError, match=r"Timed out after 0.05 s: rank 1 has not finished gather 2, which rank 0"
    ):
        left.post(0, 1, 4, HEADER_BYTES)


def test_messages_dropped_in_the_middle_of_another_call_are_done_in_order() -> None:
    (left, _), (right, _) = make_pair()
    for number in range(3):
        left.post(0, 1, 8, HEADER_BYTES)
        right.done(0, number + 1)
    left.drop(0, 2)
    assert not left.is_done(0, 1)
    left.done(0, 1)
    assert not left.is_done(0, 2)  # whoever drops may be in the middle of this
    assert left.next_number(0) == 4
    assert left.is_done(0, 2)
    assert not left.is_done(0, 3)


def _in_a_fork(boxes: Mailboxes, told: Connection) -> None:
    boxes.done(0, 1)
    boxes.drop(0, 1)
    for call in (lambda: boxes.next_number(0), lambda: boxes.read(0, 2, 1, (1, 4))):
        with pytest.raises(DistBackendError) as raised:
            call()
        told.send(str(raised.value))


def test_a_forked_process_neither_communicates_nor_lets_go_of_anything() -> None:
    (left, _), (right, _) = make_pair()
    left.post(0, 1, 4, HEADER_BYTES)
    right.done(0, 1)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(left, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        child.start()
    child.join()
    assert child.exitcode == 0
    for _ in range(2):
        assert f"process {child.pid} was forked from rank 0 (process {os.getpid()}) and cannot" in ours.recv()
    assert not left.is_done(0, 1)
    assert left.next_number(0) == 2


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
            open_arena(Place((), os.getpid(), 0, descriptor, 0, 0))
    finally:
        os.close(descriptor)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * 4096)), max_size=40))
def test_stretches_in_use_never_meet_and_free_ones_are_used_again(steps: list[tuple[int, int]]) -> None:
    stretches = Stretches(Room(HEADER_BYTES, ARENA_BYTES))
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
    stretches = Stretches(Room(HEADER_BYTES, ARENA_BYTES))
    for number in range(100):
        stretches.take(5000, number, lambda other, number=number: other < number - 1)
    assert stretches.taken_bytes == 2 * 8192
    with pytest.raises(MemoryError, match="find no room"):
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


def test_a_dump_of_the_core_leaves_arenas_out() -> None:
    descriptor, arena = make_arena()
    os.close(descriptor)
    told = Path("/proc/self/smaps").read_text().split("memfd:megatron_fsdp")[1:]
    flags = [next(line for line in each.splitlines() if line.startswith("VmFlags")) for each in told]
    assert arena.words[0] == 0
    assert flags
    assert all(" dd " in f"{line} " for line in flags)
