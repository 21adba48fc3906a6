"""Where gathered weights live: bytes under every allocator, when they are given back, and the results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.engine.memory import Block, BlockPool, CommunicationPool, usual_size
from megatron_fsdp.engine.plans import Use, prefetch_depth
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.engine.test_memory_bytes import peak_of_backward, peak_of_unsharded
from tests.support.arrangements import mesh_of
from tests.support.case import Run, Scenario, Setting, adamw_above_noise, check_strategies, shard
from tests.support.counting import held_bytes
from tests.support.formulas import (
    exchange_scratch_bytes,
    footprints_of,
    passing_bytes,
    persistent_bytes,
    step_traffic,
    transient_bytes,
)
from tests.support.on_ranks import on_ranks, same_on_ranks
from tests.support.zoo import TOWER_FEATURES, Tower, tower_case, tower_loss

pytestmark = pytest.mark.unmerged

ZERO3 = ShardingStrategy.optim_grads_params
WIDTHS = (32, 32, 64, 48, 32, 32)  # the third and the fourth floor fit no slot of the others
CHOICES: dict[WeightAllocator, dict[str, Any]] = {
    WeightAllocator.SLOTS: {},
    WeightAllocator.RESIZE: {"weight_allocator": "resize"},
    WeightAllocator.DOUBLE_BUFFER: {"fsdp_double_buffer": True},
    WeightAllocator.PERSISTENT_DOUBLE_BUFFER: dict.fromkeys(
        ("fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail"), True
    ),
    WeightAllocator.MAX_POOL: {"maxpool_double_buffer": True},
}


CASES = [*((allocator, 2) for allocator in CHOICES), (WeightAllocator.SLOTS, 3)]
GROUPS = 1 + len(WIDTHS)
PROXIES = {WeightAllocator.RESIZE: 4 + 4 * len(WIDTHS), WeightAllocator.DOUBLE_BUFFER: 8}
"""Bytes of the elements that released parameters point to; one per group whose memory was given back."""
ROOT, FLOOR, WIDE, MIDDLE = (4 * numel for numel in (2 * 256, 32 * 32, 32 * 64, 32 * 48))  # float32 bytes
TAKEN_AT_WRAP = {
    WeightAllocator.DOUBLE_BUFFER: ROOT + 2 * FLOOR,
    WeightAllocator.PERSISTENT_DOUBLE_BUFFER: ROOT + 2 * FLOOR + WIDE + MIDDLE,
    WeightAllocator.MAX_POOL: ROOT + 2 * WIDE,
}
X = torch.ones(2, TOWER_FEATURES)


@pytest.mark.parametrize(
    ("allocator", "units"), CASES, ids=lambda value: value.name.lower() if isinstance(value, WeightAllocator) else None
)
@on_ranks(2)
def test_bytes_and_traffic_are_those_of_the_formulas(allocator: WeightAllocator, units: int) -> None:
    alone, mesh = Tower(WIDTHS), mesh_of((2,), ("dp",))
    unsharded_bytes = peak_of_unsharded(alone, X)
    del alone
    before = held_bytes()
    options = CHOICES[allocator] | ({"max_gathered_units": units} if units > 2 else {})
    options |= {"device_mesh": mesh, "dp_shard_dim": "dp"}
    model, optimizer = shard(tower_case(WIDTHS), adamw_above_noise, **options)
    groups, taken = footprints_of(model), TAKEN_AT_WRAP.get(allocator, 0)
    persistent = persistent_bytes(groups, ZERO3)
    weights = persistent.total - persistent.main_grad  # nothing has been gathered or reduced yet
    assert model.memory().gathered_bytes == taken
    assert held_bytes() - before == weights - persistent.optimizer + taken + GROUPS * 4
    for position, microbatches in enumerate((1, 1, 3, 3)):  # each step foretells how long the next one is
        start = model.traffic()
        for _ in range(microbatches - 1):
            tower_loss(model, X).backward()
        peak = peak_of_backward(model, X)
        if position == 0:  # nothing foretold that the step would end here
            after_backward = model.memory().gathered_bytes
        optimizer.step()
        optimizer.zero_grad()
        if position % 2:
            assert model.traffic().since(start) == step_traffic(groups, ZERO3, microbatches, units, allocator)
    if units == 2 and allocator in (WeightAllocator.SLOTS, WeightAllocator.RESIZE, WeightAllocator.DOUBLE_BUFFER):
        assert after_backward == (0 if allocator is WeightAllocator.RESIZE else ROOT + 2 * FLOOR)

    scratch = exchange_scratch_bytes(groups, ZERO3)
    formula = transient_bytes(groups, ZERO3, slots=units, scratch_bytes=scratch, allocator=allocator)
    passing = passing_bytes(groups, ZERO3)
    assert model.memory().transient_peak_bytes == formula.total
    # At rest.
    kept = {
        WeightAllocator.SLOTS: 0,
        WeightAllocator.RESIZE: 0,
        WeightAllocator.DOUBLE_BUFFER: ROOT + 2 * FLOOR,
    }.get(allocator, formula.gathered)
    same_on_ranks([after_backward, model.memory().gathered_bytes])
    assert model.memory().gathered_bytes == kept
    # with slots, those of the root and of the units that were last in a slot
    proxies = 4 + 4 * units if allocator is WeightAllocator.SLOTS else PROXIES.get(allocator, 0)
    counters = sum(state["step"].nbytes for state in optimizer.state.values())
    assert held_bytes() - before - counters == weights + kept + proxies
    # At the peak of a step's last microbatch, beyond what is held before, which is the units used last in the backward
    # of another: what is borrowed and what the model takes.
    last_used = 4 * 32 * sum(WIDTHS[:units])
    gathered = formula.gathered - (last_used if allocator is WeightAllocator.SLOTS else kept)
    own = unsharded_bytes + passing.local_sum + passing.cast_grads
    assert gathered <= peak <= gathered + formula.buckets + formula.scratch + own


def train_and_evaluate(run: Run) -> None:
    run.train(0)
    with torch.no_grad():
        run.loss(10)
    run.backward(1, 2)
    with run.no_sync():
        run.loss(3).backward()
    with torch.inference_mode():
        run.loss(11)
    run.train(4)
    both = run.case.loss(run.model, run.batch(5)) + run.case.loss(run.model, run.batch(6))
    both.backward()
    run.step()
    run.train(7)


SETTINGS = [
    *(Setting(3, options=tuple(options.items())) for options in CHOICES.values()),
    Setting(3, options=(("max_gathered_units", 1),)),
    Setting(3, options=(("weight_allocator", "resize"), ("max_gathered_units", 3), ("backward_prefetch_units", 2))),
]


def test_every_allocator_and_limit_equals_one_process(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 3, Scenario(train_and_evaluate, tower_case((9, 9, 15, 9))), SETTINGS)


# ---- several models, one rank ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_released_weights_can_neither_be_read_nor_differentiated() -> None:
    model, _ = shard(tower_case(WIDTHS), weight_allocator="resize")
    weight = model.raw_param["floors.0.up.weight"]
    saved = []
    model.module.floors[0].register_forward_hook(lambda _module, _args, _out: saved.append((weight * weight).sum()))
    tower_loss(model, X).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved[0].backward()
    assert (tuple(weight.shape), weight.sum().item()) == ((32, TOWER_FEATURES), 0.0)


# ---- pools of borrowed memory, and how many units are gathered ahead -------------------------------------------------

POOL = CommunicationPool(torch.device("cpu"))


def room_maker(pool_of: Callable[[], BlockPool], lent: list[Block], log: list[str]) -> Callable[[], bool]:
    """Gives the oldest lent block back, as the end of a reduction does."""

    def make_room() -> bool:
        log.append("asked")
        if not lent:
            return False
        pool_of().give_back(lent.pop(0))
        return True

    return make_room


def test_an_end_waits_for_its_neighbour_and_its_neighbour_for_it() -> None:
    lent: list[Block] = []
    log: list[str] = []
    pool = BlockPool(POOL, Use.BUCKET, 2, [64, 64, 96], room_maker(lambda: pool, lent, log))
    for num_bytes, held in ((96, 96), (64, 64), (64, 128), (96, 96)):  # a head, two blocks, an embedding
        lent.append(pool.borrow(num_bytes))
        assert sum(block.held_bytes for block in lent) == held
    assert len(log) == 3


@pytest.mark.parametrize(
    ("sizes", "modules", "expected"),
    [
        ([64, 64, 96], [1, 1, 1], 64),  # two blocks and a head
        ([64, 96], [1, 1], 96),
        ([*[260] * 4, *[192] * 3, *[128] * 8, *[64] * 8], [*[4] * 4, *[3] * 3, *[2] * 8, *[1] * 8], 260),  # padded
        ([64, 64, 300], [1, 1, 2], 64),  # two different modules by one call
        ([5, 0, 0], [0, 1, 1], 0),  # frozen, beside a bucket of parameters
        ([], [], 0),
    ],
)
def test_merged_units_are_of_the_usual_size(sizes: list[int], modules: list[int], expected: int) -> None:
    assert usual_size(sizes, modules) == expected


def test_as_many_units_are_gathered_ahead_as_fit_whichever_they_are() -> None:
    depths = {0: 0, 1: 1, 30: 1, 49: 1, 50: 2, 60: 3, 10**12: 3}
    assert {numel: prefetch_depth(numel, [20, 30, 10]) for numel in depths} == depths
    assert prefetch_depth(100, []) == 0
    with pytest.raises(ConfigurationError) as caught:
        prefetch_depth(-1, [20])
    assert str(caught.value) == "-1 elements cannot be gathered ahead; give 0 (none) or more."
