"""What shared weights and buckets take over a run: nothing is left behind, and what is saved is this rank's part."""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp.shm.futex import has_futex
from tests.buffer.test_shared_in_place import memory
from tests.buffer.test_shared_memory import finish
from tests.conftest import RunRanks

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")
FEATURES = 256


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))


def resident_bytes() -> int:
    """What arenas take of this process, as the system sees them."""
    parts = Path("/proc/self/smaps").read_text().split("memfd:megatron_fsdp")[1:]
    lines = (next(line for line in part.splitlines() if line.startswith("Rss:")) for part in parts)
    return sum(int(line.split()[1]) for line in lines) * 1024


def _change_of_dtype() -> list[int]:
    model = fully_shard_model(build(), fsdp_unit_modules=[nn.Linear])
    x, found = torch.randn(2, FEATURES), []
    for _ in range(4):
        with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)):
            model(x).sum().backward()
        model(x).sum().backward()
        model.zero_grad()
        dist.barrier()
        found.append(resident_bytes())
        dist.barrier()
    return found


def test_buckets_of_another_dtype_take_the_place_of_those_before(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, _change_of_dtype):
        assert max(found) - found[0] < FEATURES * FEATURES  # a quarter of a bucket; headers take pages as they fill


def _blocks_that_are_gone() -> list[int]:
    """A block that is dropped while others read it stays, and its room is used when they have read it."""
    shared = memory()
    first = shared.block(1 << 16)
    first.hold(1 << 16)
    full = first.view(0, 1 << 14, torch.float32).fill_(1.0 + dist.get_rank())
    address = full.data_ptr()
    work = shared.reduce_scatter(full)
    del first, full
    second = shared.block(1 << 16)
    held = shared.held_bytes
    finish(work)
    total = work.total()
    found = [int(total.min()), int(total.max()), held, int(second.view(0, 1, torch.uint8).data_ptr() == address)]
    dist.barrier()
    third = shared.block(1 << 15)
    is_there = third.view(0, 1, torch.uint8).data_ptr() == address
    return [*found, int(is_there), shared.held_bytes, int(third.view(0, 8, torch.uint8).sum())]


def test_a_block_that_is_gone_stays_until_others_have_read_it(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _blocks_that_are_gone) == [[3, 3, 1 << 16, 0, 1, 0, 0]] * 2


def _saved() -> list[list[int]]:
    """Bytes of the storages that local parts lie in, and of a file of them, beside their own."""
    model = fully_shard_model(build(), fsdp_unit_modules=[nn.Linear])
    parts = [param.to_local() for param in model.parameters()]
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    with io.BytesIO() as file:
        torch.save([part.detach() for part in parts], file)
        written = file.tell()
    return [[sum(part.nbytes for part in parts), sum(storages.values()), written]]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_local_part_is_saved_without_those_of_other_ranks(run_ranks: RunRanks, num_ranks: int) -> None:
    for [(own, storages, written)] in run_ranks(num_ranks, _saved):
        assert own <= storages <= 1.02 * own  # what the layout pads is there as well
        assert storages <= written < 1.1 * own
