"""Where gathered weights live: bytes under every allocator, when they are given back, and the results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.engine_options import WeightAllocator
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.case import Run, Scenario, Setting, check_strategies, two_steps
from tests.support.counting import LiveBytes, held_bytes
from tests.support.formulas import (
    GroupFootprint,
    TransientBytes,
    exchange_scratch_bytes,
    footprints_of,
    passing_bytes,
    persistent_bytes,
    step_traffic,
    transient_bytes,
)
from tests.support.on_ranks import on_ranks, same_on_ranks
from tests.support.zoo import TOWER_FEATURES, Floor, Ordered, Recomputed, Tower, tower_loss, vector_case

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


@dataclass(frozen=True)
class Reading:
    """What one rank measured.

    Attributes:
        groups: What the formulas take.
        wrapped_bytes: What the model holds when it has just been wrapped, shards and gathered weights.
        gathered_bytes: What gathered weights take, as the engine says: after wrapping, inside the backward of the
            last unit, after a backward, after a step.
        rest_bytes: Every storage that was not there before the model, after a step; counters of steps left out.
        peak_bytes: What forward and backward of a later step take at their peak, beyond what was held before them.
        unsharded_bytes: The same of the model on its own, where every gradient is dropped at once.
        transient_bytes: The peak of borrowed memory as the engine says.
        traffic: Gathers of a step of one microbatch and of one of three.
    """

    groups: tuple[GroupFootprint, ...]
    wrapped_bytes: int
    gathered_bytes: list[int]
    rest_bytes: int
    peak_bytes: int
    unsharded_bytes: int
    transient_bytes: int
    traffic: list[Traffic]


def measure_all() -> dict[tuple[WeightAllocator, int], Reading]:
    """Every allocator with two units in flight, and those that can with three, on this rank."""
    cases: dict[tuple[WeightAllocator, int], dict[str, Any]] = {(each, 2): CHOICES[each] for each in CHOICES}
    for allocator in (WeightAllocator.SLOTS, WeightAllocator.RESIZE):
        cases[allocator, 3] = {**CHOICES[allocator], "max_gathered_units": 3}
    return {case: _measure(options) for case, options in cases.items()}


def _measure(options: dict[str, Any]) -> Reading:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    x = torch.randn(2, TOWER_FEATURES)
    unsharded = _unsharded_peak(x)
    before = held_bytes()
    model = Tower(WIDTHS)
    model, optimizer = fully_shard(
        model, torch.optim.AdamW(model.parameters()), mesh, "dp", fsdp_unit_modules=[Floor], **options
    )
    gathered = [model.memory().gathered_bytes]
    wrapped = held_bytes() - before
    traffic, peak = [], 0
    for microbatches in (1, 1, 3, 3):  # each step foretells how long the next one is
        start = model.traffic()
        for left in reversed(range(microbatches)):
            if left or len(traffic) < 3:
                tower_loss(model, x).backward()
            else:
                peak = _peak(lambda: tower_loss(model, x).backward())
        if len(gathered) == 1:
            gathered.append(model.memory().gathered_bytes)
        optimizer.step()
        optimizer.zero_grad()
        traffic.append(model.traffic().since(start))
    gathered.append(model.memory().gathered_bytes)
    counters = sum(state["step"].nbytes for state in optimizer.state.values())
    rest = held_bytes() - before - counters
    return Reading(
        footprints_of(model),
        wrapped,
        gathered,
        rest,
        peak,
        unsharded,
        model.memory().transient_peak_bytes,
        [traffic[1], traffic[3]],
    )


def _unsharded_peak(x: torch.Tensor) -> int:
    alone = Tower(WIDTHS)
    for param in alone.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    return _peak(lambda: tower_loss(alone, x).backward())


def _peak(block: Callable[[], object]) -> int:
    with LiveBytes() as live:
        block()
    return live.peak_bytes


@pytest.fixture(scope="module")
def readings(run_ranks: RunRanks) -> dict[tuple[WeightAllocator, int], Reading]:
    """What the first of two ranks measured; the second one's bytes are the same."""
    first, second = run_ranks(2, measure_all)
    assert {case: reading.gathered_bytes for case, reading in first.items()} == {
        case: reading.gathered_bytes for case, reading in second.items()
    }
    return first


Readings = dict[tuple[WeightAllocator, int], Reading]
CASES = [
    *((allocator, 2) for allocator in CHOICES),
    *((allocator, units) for allocator in (WeightAllocator.SLOTS, WeightAllocator.RESIZE) for units in (3,)),
]


def borrowed(reading: Reading, allocator: WeightAllocator, units: int) -> TransientBytes:
    scratch = exchange_scratch_bytes(reading.groups, ZERO3)
    return transient_bytes(reading.groups, ZERO3, slots=units, scratch_bytes=scratch, allocator=allocator)


GROUPS = 1 + len(WIDTHS)
STAND_INS = {WeightAllocator.SLOTS: 4, WeightAllocator.RESIZE: 4 + 4 * len(WIDTHS), WeightAllocator.DOUBLE_BUFFER: 8}
"""Bytes of the elements that released parameters point to; one per group whose memory was given back."""
ROOT, FLOOR, WIDE, MIDDLE = (4 * numel for numel in (2 * 256, 32 * 32, 32 * 64, 32 * 48))  # float32 bytes


@pytest.mark.parametrize(
    ("allocator", "units"), CASES, ids=lambda value: value.name.lower() if isinstance(value, WeightAllocator) else None
)
def test_bytes_and_traffic_are_those_of_the_formulas(
    readings: Readings, allocator: WeightAllocator, units: int
) -> None:
    reading = readings[allocator, units]
    formula, passing = borrowed(reading, allocator, units), passing_bytes(reading.groups, ZERO3)
    assert reading.transient_bytes == formula.total
    # At rest.
    kept = {
        WeightAllocator.SLOTS: 4 * 32 * sum(WIDTHS[:units]),  # those used last in backward
        WeightAllocator.RESIZE: 0,
        WeightAllocator.DOUBLE_BUFFER: ROOT + 2 * FLOOR,
    }.get(allocator, formula.gathered)
    persistent = persistent_bytes(reading.groups, ZERO3)
    assert reading.gathered_bytes[-1] == kept
    assert reading.rest_bytes == persistent.total - persistent.main_grad + kept + STAND_INS.get(allocator, 0)
    # At the peak of a step, beyond what is held before: what is borrowed and what the model takes.
    weights = formula.gathered - kept
    given_back = weights + formula.buckets + formula.scratch
    own = reading.unsharded_bytes + passing.local_sum + passing.cast_grads
    assert weights <= reading.peak_bytes <= given_back + own
    assert reading.traffic == [step_traffic(reading.groups, ZERO3, count, units, allocator) for count in (1, 3)]


def test_buffers_are_taken_when_wrapping_or_when_used(readings: Readings) -> None:
    at_wrap = {
        WeightAllocator.DOUBLE_BUFFER: ROOT + 2 * FLOOR,
        WeightAllocator.PERSISTENT_DOUBLE_BUFFER: ROOT + 2 * FLOOR + WIDE + MIDDLE,
        WeightAllocator.MAX_POOL: ROOT + 2 * WIDE,
    }
    for allocator in CHOICES:
        reading, taken = readings[allocator, 2], at_wrap.get(allocator, 0)
        assert reading.gathered_bytes[0] == taken
        persistent = persistent_bytes(reading.groups, ZERO3, optimizer_states_per_param=0)
        weights = persistent.total - persistent.main_grad  # nothing has been gathered or reduced yet
        assert reading.wrapped_bytes == weights + taken + GROUPS * 4


def test_memory_is_given_back_when_the_backward_is_over(readings: Readings) -> None:
    after_backward = {allocator: readings[allocator, 2].gathered_bytes[1] for allocator in CHOICES}
    assert after_backward[WeightAllocator.RESIZE] == 0
    assert after_backward[WeightAllocator.DOUBLE_BUFFER] == ROOT + 2 * FLOOR
    assert after_backward[WeightAllocator.SLOTS] == ROOT + 2 * FLOOR  # nothing foretold that the step would end here


# ---- results -------------------------------------------------------------------------------------------------------


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


class Uneven(Ordered):
    """Four layers, of which one is wider than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up = torch.nn.Linear(6, 15)  # type: ignore[union-attr]
        self.layers[1].down = torch.nn.Linear(15, 6)  # type: ignore[union-attr]


def test_every_allocator_and_limit_equals_one_process(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 2, Scenario(train_and_evaluate, vector_case(Uneven)), SETTINGS)


@pytest.mark.full(short=["pairs"])
@pytest.mark.parametrize(
    "build",
    [partial(Recomputed, "pairs", reentrant=True), partial(Ordered, (0, 1, 0, 2, 3, 1))],
    ids=["pairs", "reused"],
)
def test_recomputed_and_reused_units_equal_one_process_in_storages_that_come_and_go(
    run_ranks: RunRanks, build: Callable[[], torch.nn.Module]
) -> None:
    options = [
        (("weight_allocator", "resize"),),
        (("weight_allocator", "resize"), ("max_gathered_units", 1)),
        (("maxpool_double_buffer", True),),
    ]
    check_strategies(
        run_ranks, 2, Scenario(two_steps, vector_case(build)), [Setting(3, options=each) for each in options]
    )


# ---- several models, one rank ----------------------------------------------------------------------------------------


def wrapped_tower(**options: Any) -> MegatronFSDP:
    model = Tower(WIDTHS)
    return fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), fsdp_unit_modules=[Floor], **options)[0]


X = torch.ones(2, TOWER_FEATURES)


@on_ranks(2)
def test_two_models_in_one_process_share_no_memory() -> None:
    """Both in the middle of a forward pass."""
    for options in CHOICES.values():
        models = [wrapped_tower(**options) for _ in range(2)]
        for model in models:
            tower_loss(model, X)
        first, second = (
            {param.untyped_storage().data_ptr() for param in model.raw_param.values()} - {0} for model in models
        )
        assert len(first) == len(second) > 0
        assert not first & second


@on_ranks(2)
def test_released_weights_can_neither_be_read_nor_differentiated() -> None:
    model = wrapped_tower(weight_allocator="resize")
    weight = model.raw_param["floors.0.up.weight"]
    saved = []
    model.module.floors[0].register_forward_hook(lambda _module, _args, _out: saved.append((weight * weight).sum()))
    tower_loss(model, X).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved[0].backward()
    assert (tuple(weight.shape), weight.sum().item()) == ((32, TOWER_FEATURES), 0.0)


@on_ranks(2)
def test_models_without_units_are_refused_alike_on_all_ranks() -> None:
    said = "=True has no effect on a model without units besides the root; name the classes of its units"
    for name in ("fsdp_double_buffer", "maxpool_double_buffer", "enable_fine_grained_param_gather"):
        with pytest.raises(ConfigurationError, match=said) as raised:
            fully_shard_model(torch.nn.Linear(4, 4), fsdp_unit_modules=[], **{name: True})
        same_on_ranks(str(raised.value))
