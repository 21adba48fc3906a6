"""Reductions that nobody waits for any more, as after Ctrl-C in a wait, and what ranks are told that differ."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.shm.futex import has_futex
from megatron_fsdp.shm.shared_arena import HEADER_BYTES
from tests.buffer.test_mailbox import make_pair
from tests.buffer.test_shared_in_place import memory
from tests.conftest import RunRanks

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")


def _dropped() -> list[int]:
    """The memory of a reduction that was launched and dropped is there again, also where no other is launched."""
    shared = memory()
    block = shared.block(4096)
    found = []
    for turn in range(3):
        block.hold(4096)
        work = shared.reduce_scatter(block.view(0, 8, torch.float32).fill_(turn))
        del work
        block.empty()
        found.append(block.held_bytes)
    return found


def test_memory_of_a_reduction_that_was_dropped_is_there_again(run_ranks: RunRanks) -> None:
    assert run_ranks(2, _dropped) == [[0, 0, 0]] * 2


class Interrupting(set[int]):
    """Ctrl-C comes at the first use of a kind."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def _meet(self, method: str) -> None:
        if self.method == method:
            self.method = ""
            raise KeyboardInterrupt

    def add(self, number: int) -> None:
        super().add(number)
        self._meet("add")

    def remove(self, number: int) -> None:
        self._meet("before remove")
        super().remove(number)
        self._meet("remove")


@pytest.mark.parametrize("method", ["add", "before remove", "remove"])
def test_ctrl_c_never_loses_that_a_message_is_done(method: str) -> None:
    (left, _), (right, _) = make_pair()
    for boxes in (left, right):
        boxes.post(1, 2, 8, HEADER_BYTES)
        boxes.post(1, 2, 8, HEADER_BYTES)
    left._finished = (set(), Interrupting(method))
    with pytest.raises(KeyboardInterrupt):
        left.done(1, 1)
    left.done(1, 2)
    for number in (1, 2):
        right.done(1, number)
    assert [left.is_done(1, number) and right.is_done(1, number) for number in (1, 2)] == [True, True]


def _differ() -> str:
    """One rank has an evaluation more than the other, which goes on with its backward."""
    torch.manual_seed(1)
    model = fully_shard_model(nn.Sequential(nn.Linear(4, 4)), fsdp_unit_modules=[nn.Linear])
    told = ""
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(1, 4))
        loss = model(torch.ones(1, 4)).sum()
        if dist.get_rank() == 1:
            with model.no_sync():
                loss.backward()
    except dist.DistBackendError as error:
        told = str(error)
    dist.barrier()
    return told


def test_ranks_that_are_in_different_passes_are_told_in_which(run_ranks: RunRanks) -> None:
    told = [text for text in run_ranks(2, _differ) if "has failed, because of" not in text]
    assert told
    for text in told:
        assert "ranks differ in gather 3: " in text
        assert {"the beginning of a pass" in text, "the end of a pass" in text} == {True}


class Breaking(nn.Module):
    """A linear layer whose backward fails on one rank."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if self.breaks:
            y.register_hook(_fail)
        return y


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def _missing() -> list[str]:
    """Rank 1 fails at the beginning of its backward and lets go; what rank 0 is told where it wants a bucket back."""
    torch.manual_seed(1)
    breaks = dist.get_rank() == 1
    layers = [Breaking(breaks and layer == 3) for layer in range(4)]
    model = fully_shard_model(nn.Sequential(*layers), fsdp_unit_modules=[Breaking])
    told: list[str] = []
    try:
        model(torch.ones(2, 4)).sum().backward()
    except ZeroDivisionError:
        told.append("failed")
    except dist.DistBackendError as error:
        told += [str(error), *error.__notes__]
    del model, layers
    gc.collect()
    dist.barrier()
    return told


def test_an_error_of_a_wait_for_a_bucket_says_where_it_was(run_ranks: RunRanks) -> None:
    (told, note), failed = run_ranks(2, _missing)
    assert failed == ["failed"]
    assert told == "rank 1 has let go of its model and has not come to reduction 1, which rank 0 waits for"
    assert note.startswith("while gradients of unit 1 need memory; if a rank is missing, MFSDP_HANG_LOG=DIR names it")
