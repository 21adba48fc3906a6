"""Memory does not drift: equal peaks step after step, and everything back when a model is deleted."""

import gc
from typing import Any

import pytest
import torch

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.conftest import RunRanks
from tests.support.live_bytes import LiveBytes, comes_and_goes, held_bytes
from tests.support.tower import FEATURES, Floor, Tower, tower_loss

STEPS = 12
WIDTHS = (8, 8, 16, 8)

CASES: dict[str, dict[str, Any]] = {
    "no_shard, late": {"zero_dp_strategy": 0, "overlap_grad_reduce": False},
    "optim": {"zero_dp_strategy": 1},
    "optim_grads": {"zero_dp_strategy": 2},
    "slots": {},
    "resize": {"weight_allocator": "resize"},
    "double buffer": {"fsdp_double_buffer": True},
    "persistent double buffer": {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True},
    "max pool": {"maxpool_double_buffer": True},
    "fine-grained": {"enable_fine_grained_param_gather": True},
}
each_case = pytest.mark.parametrize("name", list(CASES))


def wrap(name: str) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    model = Tower(WIDTHS)
    return fully_shard(model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[Floor], **CASES[name])


def step(model: MegatronFSDP, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    tower_loss(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def peaks_and_ends(name: str) -> list[tuple[int, int]]:
    """For each step the most that was alive in it and what it left alive, beyond what was there before it."""
    model, optimizer = wrap(name)
    x = torch.ones(2, FEATURES)
    found = []
    for _ in range(STEPS):
        with LiveBytes(comes_and_goes(model)) as live:
            step(model, optimizer, x)
        found.append((live.peak_bytes, live.now_bytes))
    return found


@pytest.mark.full(short=["resize"])
@each_case
def test_the_peak_varies_by_zero_bytes_from_the_third_step_on(run_ranks: RunRanks, name: str) -> None:
    for found in run_ranks(2, peaks_and_ends, name):
        later = found[2:]
        assert later == [later[0]] * (STEPS - 2)
        peak, left = later[0]
        assert peak > 0
        assert left == 0


def held_before_and_after(name: str) -> tuple[int, int, int]:
    """Bytes alive before a model, with it, and after it was deleted, with the garbage collector off."""
    _held(name)  # what torch makes once per process, at the first use of something, is no matter of ours
    return _held(name)


def _held(name: str) -> tuple[int, int, int]:
    before = held_bytes()
    x = torch.ones(2, FEATURES)
    model, optimizer = wrap(name)
    for _ in range(2):
        step(model, optimizer, x)
    with model.no_sync():
        tower_loss(model, x).backward()
    held = held_bytes()
    gc.disable()
    try:
        del model, optimizer, x
        return before, held, held_bytes(collect=False)
    finally:
        gc.enable()


@pytest.mark.full(short=["resize"])
@each_case
def test_deleting_gives_every_byte_back_without_garbage_collection(run_ranks: RunRanks, name: str) -> None:
    for before, held, after in run_ranks(2, held_before_and_after, name):
        assert held > before
        assert after == before
