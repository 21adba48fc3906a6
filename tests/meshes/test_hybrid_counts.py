"""What hybrid sharding sends on which axis, how often, and what it holds, by hand-made sums.

The tower has 8 units of 1024 parameters and a root of 512, which 4 ranks divide without padding. P is their sum, N = 2
inner and M = 2 outer ranks.
"""

from dataclasses import dataclass

import pytest
import torch

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid_arguments
from tests.support.counting import ALL_REDUCE, EXCHANGE, GATHER, OpCounts
from tests.support.on_ranks import on_ranks
from tests.support.zoo import FLOOR_NUMEL, FLOORS, ROOT_NUMEL, Floor, Tower, tower_loss

pytestmark = pytest.mark.unmerged

UNITS = FLOORS + 1
P = ROOT_NUMEL + FLOORS * FLOOR_NUMEL
REGATHERED = (FLOORS - 2) * FLOOR_NUMEL
"""Two floors stay gathered at a time, so the last two of forward are the first two of backward."""

FP32, BF16 = 4, 2
STRATEGIES = ((3, 0), (3, 1))


def set_auto_sync(model: MegatronFSDP, x: torch.Tensor, microbatches: int) -> None:
    for microbatch in range(microbatches):
        model.set_model_auto_sync(microbatch == microbatches - 1)
        tower_loss(model, x).backward()


def leave_it_to_the_optimizer(model: MegatronFSDP, x: torch.Tensor, microbatches: int) -> None:
    model.set_model_auto_sync(False)
    for _ in range(microbatches):
        tower_loss(model, x).backward()


def no_sync(model: MegatronFSDP, x: torch.Tensor, microbatches: int) -> None:
    with model.no_sync():
        for _ in range(microbatches - 1):
            tower_loss(model, x).backward()
    tower_loss(model, x).backward()


def plain(model: MegatronFSDP, x: torch.Tensor, microbatches: int) -> None:
    for _ in range(microbatches):
        tower_loss(model, x).backward()


LOOPS = (set_auto_sync, leave_it_to_the_optimizer, no_sync, plain)


@dataclass(frozen=True)
class Reading:
    """(calls, bytes sent) of one steady optimizer step of one rank."""

    inner_gathers: tuple[int, int]
    inner_reductions: tuple[int, int]
    outer_gathers: tuple[int, int]
    outer_exchanges: tuple[int, int]
    outer_sums: tuple[int, int]
    everything: int


def shard(inner: int, outer: int, dtype: torch.dtype) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    model = Tower().to(dtype)
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters()),
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        fsdp_unit_modules=[Floor],
        **hybrid_arguments(2, 2),
    )


def count_all(microbatches: int) -> dict[tuple[int, int, str], Reading]:
    mesh = hybrid_arguments(2, 2)["device_mesh"]
    inner_group, outer_group = mesh["dp_shard"].get_group(), mesh["dp_outer"].get_group()
    readings = {}
    for inner, outer in STRATEGIES:
        for loop in LOOPS if microbatches > 1 else (plain,):
            model, optimizer = shard(inner, outer, torch.float32)
            for _ in range(2):
                with OpCounts() as counts:
                    loop(model, torch.ones(2, 16), microbatches)
                    optimizer.step()
                    optimizer.zero_grad()
            readings[inner, outer, loop.__name__] = Reading(
                counts.on(inner_group, GATHER),
                counts.on(inner_group, EXCHANGE, ALL_REDUCE),
                counts.on(outer_group, GATHER),
                counts.on(outer_group, EXCHANGE),
                counts.on(outer_group, ALL_REDUCE),
                len(counts.sent),
            )
    return readings


Readings = dict[int, list[dict[tuple[int, int, str], Reading]]]


@pytest.fixture(scope="module")
def readings(run_ranks: RunRanks) -> Readings:
    return {microbatches: run_ranks(4, count_all, microbatches) for microbatches in (1, 3)}


@pytest.mark.parametrize(("loop", "microbatches"), [*((loop.__name__, 3) for loop in LOOPS), ("plain", 1)])
def test_the_outer_axis_is_used_once_per_step(readings: Readings, loop: str, microbatches: int) -> None:
    """HSDP: 2P/N times (M - 1)/M elements in one all-reduce per unit. HFSDP: half of it each way, gradients out, new
    weights back. A plain loop shows gradients after each backward. Nothing else is sent."""
    syncs = microbatches if loop == "plain" else 1
    for rank in readings[microbatches]:
        hsdp, hfsdp = rank[3, 0, loop], rank[3, 1, loop]
        assert hsdp.outer_sums == (syncs * UNITS, syncs * (2 * P // 2) // 2 * FP32)
        assert hsdp.outer_gathers == hsdp.outer_exchanges == (0, 0)
        assert hfsdp.outer_exchanges == (syncs * UNITS, syncs * (P // 2) // 2 * FP32)
        assert hfsdp.outer_gathers == (UNITS, (P // 2) // 2 * FP32)
        assert hfsdp.outer_sums == (0, 0)
        for each in (hsdp, hfsdp):
            known = (each.inner_gathers, each.inner_reductions, each.outer_gathers, each.outer_exchanges)
            assert each.everything == sum(calls for calls, _ in (*known, each.outer_sums))


@pytest.mark.parametrize("outer", [0, 1])
def test_inside_a_step_sends_what_it_would_without_outer_ranks(readings: Readings, outer: int) -> None:
    """At most 3P times (N - 1)/N elements: weights once per pass that has to, gradients once, or once less deferred."""
    gathered = P + REGATHERED
    assert gathered + P <= 3 * P
    for rank in readings[1]:
        reading = rank[3, outer, "plain"]
        assert reading.inner_gathers == (UNITS + FLOORS - 2, gathered // 2 * FP32)
        assert reading.inner_reductions == (UNITS, P // 2 * FP32)
    for rank in readings[3]:
        for loop, reduced in (("set_auto_sync", 3), ("no_sync", 1), ("plain", 3)):
            assert rank[3, outer, loop].inner_reductions == (reduced * UNITS, reduced * P // 2 * FP32)


@pytest.mark.parametrize(("inner", "outer"), STRATEGIES)
@on_ranks(4)
def test_outer_reductions_are_under_way_while_inner_ones_are_issued(inner: int, outer: int) -> None:
    mesh = hybrid_arguments(2, 2)["device_mesh"]
    inner_group, outer_group = (mesh[name].get_group().group_name for name in ("dp_shard", "dp_outer"))
    model, optimizer = shard(inner, outer, torch.float32)
    for _ in range(2):
        with OpCounts() as counts:
            tower_loss(model, torch.ones(2, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    reductions = [group for group, name, _ in counts.sent if name in (EXCHANGE, ALL_REDUCE)]
    assert reductions.count(outer_group) == UNITS
    last_inner = len(reductions) - 1 - reductions[::-1].index(inner_group)
    # All but those of the units that are the last to be reduced inside.
    assert reductions[:last_inner].count(outer_group) >= UNITS - 3


@pytest.mark.parametrize(("inner", "outer"), [(0, 0), (2, 0), (1, 1), (3, 1)])
@on_ranks(4)
def test_persistent_bytes_are_those_of_the_formulas(inner: int, outer: int) -> None:
    """bf16 weights and gradients, float32 main weights and Adam; M outer ranks divide what the optimizer holds only."""
    n, m = 2, 2
    model, optimizer = shard(inner, outer, torch.bfloat16)
    tower_loss(model, torch.ones(2, 16, dtype=torch.bfloat16)).backward()
    weight_parts = n if inner == 3 else 1
    parts = (n if inner >= 1 else 1) * (m if outer == 1 else 1)
    visible = sum(param.grad.to_local().nbytes for param in model.parameters() if param.grad is not None)
    assert visible == FP32 * P // parts  # in the dtype of main weights, for the optimizer
    optimizer.step()
    state = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    assert sum(value.to_local().nbytes for value in state) == 2 * FP32 * P // parts
    memory = model.memory()
    assert memory.compute_weight_bytes == BF16 * P // weight_parts
    assert memory.main_weight_bytes == FP32 * P // parts
    assert memory.main_grad_bytes == BF16 * P // parts  # what waits for the outer reduction is gone by then
