"""Faults that are planted in the engine are found, and the unit is named; what only poison shows is NaN."""

import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.comm.lanes import HostLane, HostTicket
from megatron_fsdp.engine.executor import Executor
from megatron_fsdp.engine.gradients import GradientBuffers
from megatron_fsdp.engine.memory import Block, BucketPool, WeightMemory
from megatron_fsdp.engine.schedule import Action, Operation, Scheduler
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import LifetimeError
from tests.conftest import RunRanks
from tests.support.on_ranks import engine_of, fixed_seed, on_ranks, same_on_ranks
from tests.support.zoo import TOWER_FEATURES, Floor, Tower, tower_loss

Fault = Callable[[], Any]


def _release_skipped() -> Any:
    original = Scheduler._release

    def dropping(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return type(found)(operation for operation in found if operation.action is not Action.RELEASE)

    return mock.patch.object(Scheduler, "_release", dropping)


def _released_inside_its_forward() -> Any:
    """The third floor lets go of its own weights."""

    def releasing(self: Floor, x: torch.Tensor) -> torch.Tensor:
        model = MODELS[-1]
        if self is model.module.floors[2]:
            engine_of(model).executor.run((Operation(Action.RELEASE, 3),))
        return x + self.down(torch.relu(self.up(x)))

    return mock.patch.object(Floor, "forward", releasing)


def _slot_given_twice() -> Any:
    """Two units get one memory though neither the scheduler nor the plan says so."""
    original = WeightMemory.take

    def one_for_two(self: WeightMemory, unit: int, slot: int | None) -> Block:
        return original(self, unit, 1 if unit in (2, 3) else slot)

    return mock.patch.object(WeightMemory, "take", one_for_two)


def _used_block_handed_out() -> Any:
    original = BucketPool.borrow

    def always_the_same(self: BucketPool, num_bytes: int) -> Block:
        return self._made[0] if self._made else original(self, num_bytes)

    return mock.patch.object(BucketPool, "borrow", always_the_same)


def _reduction_never_waited_for() -> Any:
    """A bucket goes back to its pool before its reduction has ended."""
    original = HostLane.submit

    def submit(self: HostLane, *args: Any, **kwargs: Any) -> Any:
        ticket = original(self, *args, **kwargs)
        return HostTicket(None, None) if self._name == "reduce" else ticket

    return mock.patch.object(HostLane, "submit", submit)


def _given_back_twice() -> Any:
    original = Executor.reduce

    def twice(self: Executor, *args: Any) -> None:
        original(self, *args)
        self.in_flight.append(self.in_flight[-1])

    return mock.patch.object(Executor, "reduce", twice)


MODELS: list[MegatronFSDP] = []
"""The model that is trained with a fault."""

FAULTS: dict[str, tuple[Fault, str]] = {
    "a RELEASE skipped": (
        _release_skipped,
        r"unit floors.2: gathered weights cannot be gathered into memory in which unit floors.\d is READY",
    ),
    "a wait that does not wait": (
        partial(mock.patch.object, Unit, "wait_for_unshard", return_value=None),
        r"unit \(root\): gathered weights cannot be used on while 1 collectives .* have not been waited for",
    ),
    "released inside its forward": (
        _released_inside_its_forward,
        r"unit floors.2: gathered weights cannot be released while its forward computes with them",
    ),
    "one slot for two units": (
        _slot_given_twice,
        r"unit floors.2: gathered weights cannot be gathered into memory in which unit floors.1 is READY",
    ),
    "a used block handed out": (
        _used_block_handed_out,
        r"unit floors.6: communication bucket \(number 1, last lent to unit floors.7\) cannot be lent while REDUCING",
    ),
    "a bucket reused before its reduction ended": (
        _reduction_never_waited_for,
        r"unit floors.\d: communication bucket cannot be used on while 1 collectives .* have not been waited for",
    ),
    "given back twice": (
        _given_back_twice,
        r"unit floors.7: communication bucket \(number 1, last lent to unit floors.5\) cannot be given back",
    ),
}


def _wrapped(is_checked: bool) -> MegatronFSDP:
    with fixed_seed(0):
        module = Tower()
    model, _ = fully_shard(module, torch.optim.SGD(module.parameters(), lr=0.1), fsdp_unit_modules=[Floor])
    if is_checked:
        model.check_lifetimes()
    return model


def _train_twice(model: MegatronFSDP) -> None:
    for _ in range(2):
        tower_loss(model, torch.ones(2, TOWER_FEATURES)).backward()


@pytest.mark.parametrize("name", FAULTS)
@on_ranks(2)
def test_faults_are_found_and_the_unit_is_named(name: str) -> None:
    model = _wrapped(is_checked=True)
    MODELS[:] = [model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what hooks raise after that
        with FAULTS[name][0](), pytest.raises(LifetimeError) as caught:
            _train_twice(model)
    for ticket in [ticket for unit in engine_of(model).units for ticket in unit.tickets]:
        ticket.wait()
    MODELS.clear()
    dist.barrier()
    first = same_on_ranks(str(caught.value))
    assert re.search(FAULTS[name][1], first), first


def stale_read(is_checked: bool) -> tuple[float, float]:
    """The loss of a model that first reads what it kept of a weight of an earlier step; and of an ordinary step."""
    model = _wrapped(is_checked)
    kept: list[torch.Tensor] = []
    floors, x = model.module.floors, torch.ones(2, TOWER_FEATURES)
    with torch.no_grad():
        keep = floors[7].register_forward_pre_hook(lambda floor, *_: kept.append(floor.up.weight.detach()))
        ordinary = tower_loss(model, x).item()
        keep.remove()
        model.install_optimized_model_weights()
        read = model.module.first.register_forward_hook(lambda _first, _args, out: out + kept[-1].sum())
        stale = tower_loss(model, x).item()
        read.remove()
    assert tower_loss(model, x).item() == ordinary
    return stale, ordinary


@on_ranks(2)
def test_stale_weights_are_nan() -> None:
    (unseen, plain), (stale, after) = stale_read(is_checked=False), stale_read(is_checked=True)
    assert math.isfinite(unseen), "without the checker a stale read gives some value"
    assert math.isnan(stale)
    assert after == plain


def unfilled() -> int:
    """NaN in the main gradients where the engine forgets to clear what no gradient came for."""
    model = _wrapped(is_checked=True)
    original = GradientBuffers.reduce

    def forgetful(self: GradientBuffers, *args: Any) -> Any:
        for each in self.of_parameter:
            each.filled = True
        return original(self, *args)

    x = torch.ones(2, TOWER_FEATURES)
    with mock.patch.object(GradientBuffers, "reduce", forgetful):
        floor = model.module.floors[4]
        with mock.patch.object(floor, "forward", lambda x: x + floor.down(floor.down.weight.new_ones(1, 32))):
            tower_loss(model, x).backward()
    mains = [group.gradients.main.local for group in model.parameter_groups() if group.gradients is not None]
    return sum(int(main.isnan().sum()) for main in mains)


def test_unfilled_parts_of_buckets_are_nan(run_ranks: RunRanks) -> None:
    """Rank 0 and 1 share the 512 elements of the unused layer."""
    assert sum(run_ranks(2, unfilled)) == 512


FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def test_poison_is_nan_in_every_floating_dtype_and_empty_blocks_stay_empty() -> None:
    block = Block(64, torch.device("cpu"))
    block.poison()
    for dtype in FLOATING:
        assert block.view(0, 64 // dtype.itemsize, dtype).float().isnan().all()
    block.empty()
    block.poison()
    assert block.held_bytes == 0
