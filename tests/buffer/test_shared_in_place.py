"""What other ranks read where it lies: whole weights and blocks, and that nobody changes them while they are read."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.shm.futex import has_futex
from megatron_fsdp.shm.shared_arena import PAGE_BYTES
from megatron_fsdp.shm.shared_memory import SharedMemory
from tests.buffer.test_shared_memory import finish, shared_axis, values
from tests.conftest import RunRanks

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LATE_S = 0.3


def memory() -> SharedMemory:
    shared = shared_axis().shared
    assert shared is not None
    return shared


def _whole() -> list[bool]:
    """Each rank writes its own part; after a gather all read all, with nothing copied and nothing counted twice."""
    axis = shared_axis()
    shared = axis.shared
    assert shared is not None
    found = []
    for dtype in DTYPES:
        for part in (1, 1000):
            numel = part * axis.num_ranks
            before = shared.held_bytes
            whole = shared.whole(numel, dtype)
            found.append(torch.count_nonzero(whole).item() == 0)
            mine = whole[axis.rank * part : (axis.rank + 1) * part]
            finish(axis.all_gather(whole, mine))  # all have seen the zeros
            finish(shared.end_pass())
            mine.copy_(values(axis.rank, part, dtype))
            finish(axis.all_gather(whole, mine))
            expected = torch.cat([values(rank, part, dtype) for rank in range(axis.num_ranks)])
            found += [torch.equal(whole, expected), shared.held_bytes - before == mine.nbytes]
            finish(shared.end_pass())
    return [*found, shared.copied_bytes == 0]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_whole_tensors_are_one_memory_of_all_ranks(run_ranks: RunRanks, num_ranks: int) -> None:
    for found in run_ranks(num_ranks, _whole):
        assert found == [True] * 19


def _step_at_once() -> list[float]:
    """Rank 0 changes its part as soon as the pass has ended for it; the others are late to read."""
    axis = shared_axis()
    shared = axis.shared
    assert shared is not None
    whole = shared.whole(4 * axis.num_ranks, torch.float32)
    seen = []
    for step in range(3):
        whole[4 * axis.rank : 4 * axis.rank + 4] = step
        finish(axis.all_gather(whole, whole[4 * axis.rank : 4 * axis.rank + 4]))
        if axis.rank:
            time.sleep(LATE_S)
        seen.append(whole.sum().item())
        finish(shared.end_pass())
    return seen


def test_a_pass_ends_when_the_last_rank_has_read(run_ranks: RunRanks) -> None:
    assert run_ranks(3, _step_at_once) == [[0.0, 12.0, 24.0]] * 3


def _sums_of_blocks() -> list[Any]:
    """Reductions of tensors in a block, refilled at once, while the last rank is late to read what was there."""
    axis = shared_axis()
    shared = axis.shared
    assert shared is not None
    found: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16):
        block = shared.block(1 << 17)
        for turn in range(4):
            block.hold(1 << 17)
            full = block.view(256 * turn, 40_000 * axis.num_ranks // 4, dtype)
            numel = full.numel() // axis.num_ranks
            full.copy_(values(10 * turn + axis.rank, full.numel(), dtype))
            work = axis.add_up(full)
            if axis.rank == axis.num_ranks - 1:
                time.sleep(LATE_S / 3)
            finish(work)
            parts = [values(10 * turn + rank, full.numel(), dtype) for rank in range(axis.num_ranks)]
            expected = torch.zeros(numel, dtype=torch.float32)
            for part in parts:
                expected += part[axis.rank * numel : (axis.rank + 1) * numel]
            found.append(torch.equal(work.total().float(), expected))
        block.empty()
        found.append(block.held_bytes)
    return [*found, shared.copied_bytes]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_block_is_used_again_when_all_have_read_it(run_ranks: RunRanks, num_ranks: int) -> None:
    for found in run_ranks(num_ranks, _sums_of_blocks):
        assert found == [*[True] * 4, 0, *[True] * 4, 0, 0]


def _given_back() -> list[int]:
    """Pages that blocks take, as the system sees them."""
    shared, found = memory(), []

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split("memfd:megatron_fsdp")
        of_each = (next(line for line in part.splitlines() if line.startswith("Rss:")) for part in lines[1:])
        return sum(int(line.split()[1]) for line in of_each) * 1024

    block = shared.block(64 * PAGE_BYTES)
    before = resident()
    for num_bytes in (10 * PAGE_BYTES + 1, 64 * PAGE_BYTES, PAGE_BYTES):  # it grows, and its pages stay
        block.hold(num_bytes)
        block.view(0, num_bytes, torch.uint8).fill_(7)
        found += [(resident() - before) // PAGE_BYTES, block.held_bytes]
    block.empty()
    found += [(resident() - before) // PAGE_BYTES, block.held_bytes]
    block.hold(PAGE_BYTES)
    found.append(int(block.view(0, PAGE_BYTES, torch.uint8).sum()))
    return found


def test_what_a_block_holds_no_more_goes_back_to_the_system(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _given_back) == [[11, 10 * PAGE_BYTES + 1, *[64, 64 * PAGE_BYTES] * 2, 0, 0, 0]] * 2


def _needed_before_its_own_wait() -> str:
    shared = memory()
    block = shared.block(4096)
    block.hold(4096)
    work = shared.reduce_scatter(block.view(0, 8, torch.float32))
    try:
        block.hold(4096)
    except dist.DistBackendError as error:
        told = str(error)
    finish(work)
    dist.barrier()
    return told


def test_a_block_whose_reduction_was_not_waited_for_is_refused(run_ranks: RunRanks) -> None:
    for rank, told in enumerate(run_ranks(2, _needed_before_its_own_wait)):
        assert told == f"memory of reduction 1 is needed, for which rank {rank} has not waited"
