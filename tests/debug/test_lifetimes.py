"""With lifetimes checked, and with delays at random places, every bit of the results stays the same."""

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.comm.collectives import HostCommStream, HostWork
from megatron_fsdp.config.engine_options import resolve_check_lifetimes
from megatron_fsdp.debug.lifetimes import LEGAL, BorrowedMemory, Event, State, next_state
from megatron_fsdp.engine.executor import Executor
from megatron_fsdp.engine.gradients import GradientBuffers
from megatron_fsdp.engine.memory import Block, BlockPool, WeightMemory
from megatron_fsdp.engine.schedule import Action, Operation, Scheduler
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, LifetimeError
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid
from tests.support.case import DdpSetting, Recording, Run, Scenario, Setting, ddp, outcome_of
from tests.support.delays import inject_delays
from tests.support.on_ranks import engine_of, fixed_seed, of_ranks, on_ranks, same_on_ranks
from tests.support.zoo import (
    MODEL_CASES,
    TOWER_FEATURES,
    FailingModel,
    Floor,
    ModelName,
    PlannedError,
    Recomputed,
    Tower,
    failing_at,
    tower_loss,
    vector_case,
)

UP_TO_S = 0.001
_BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
CASES = {
    **MODEL_CASES,
    "recomputed": vector_case(partial(Recomputed, "pairs", False)),
    "failing": vector_case(FailingModel),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def steps(run: Run) -> None:
    """Two steps of one microbatch and one of three."""
    run.train(0, 1)
    with run.no_sync():
        run.backward(2, 3)
    run.train(4)


def fail_and_go_on(run: Run) -> None:
    """A pass that fails at a point on every rank, a reset, and two more steps; for two points."""
    assert run.sharded is not None
    run.train(0)
    for point in ("forward", "backward of the output"):
        with pytest.raises(PlannedError), failing_at(run.module, 1, point):
            run.backward(1)
        run.sharded.reset()
        run.optimizer.zero_grad()
        run.train(2, 3)


def outcomes(
    name: ModelName, setting: Setting | DdpSetting, seeds: tuple[int, ...], script: Callable[[Run], None] = steps
) -> list[Recording]:
    """The same run: alone, checked, and checked with the delays of each seed."""
    found = []
    for seed in (None, 0, *seeds):
        run = Run(Scenario(script, CASES[name], adam), setting)
        assert run.sharded is not None
        if seed is not None:
            run.sharded.check_lifetimes()
        with inject_delays(run.sharded, seed, UP_TO_S) if seed else contextlib.nullcontext() as delays:
            script(run)
        assert delays is None or delays.count > 20
        found.append(outcome_of(run))
    return found


_PLAIN = Setting(3)
_BUCKETS = dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True)
_SETTINGS: dict[str, tuple[ModelName, Setting | DdpSetting]] = {
    **{f"strategy {strategy}": ("tied", Setting(strategy)) for strategy in (1, 2)},
    "one slot": ("partly_frozen", replace(_PLAIN, options=(("max_gathered_units", 1),))),
    "resize": ("transformer", replace(_PLAIN, options=(("weight_allocator", "resize"),))),
    "double buffer": ("transformer", replace(_PLAIN, options=(("fsdp_double_buffer", True),))),
    "max pool": ("unused", replace(_PLAIN, options=(("maxpool_double_buffer", True),))),
    "mixed precision": ("bf16_fp32_norm", replace(_PLAIN, policy=_BF16)),
    "recomputation": ("recomputed", _PLAIN),
    "buckets": ("transformer", ddp(**_BUCKETS, bucket_size=2000)),
    "HFSDP": ("transformer", replace(_PLAIN, outer_strategy=1, arrangement=hybrid(2, 2))),
}


def assert_same(by_rank: list[list[Recording]]) -> None:
    for alone, *others in by_rank:
        assert all(torch.isfinite(torch.tensor(alone.losses)))
        for other in others:
            assert (other.losses, other.digest) == (alone.losses, alone.digest)


@pytest.mark.full(short=["resize", "buckets"])
@pytest.mark.parametrize(("name", "setting"), _SETTINGS.values(), ids=_SETTINGS.keys())
def test_results_stay_the_same(name: ModelName, setting: Setting | DdpSetting, run_ranks: RunRanks) -> None:
    num_ranks = 4 if "hybrid" in setting.arrangement.name else 2
    assert_same(run_ranks(num_ranks, outcomes, name, setting, (1, 7) if name == "tied" else (1,)))


def test_exceptions_and_resets(run_ranks: RunRanks) -> None:
    assert_same(run_ranks(2, outcomes, "failing", _PLAIN, (), fail_and_go_on))


# ---- the table of states ---------------------------------------------------------------------------------------------


def test_everything_else_raises_with_names() -> None:
    count = 0
    for memory, state, event in itertools.product(BorrowedMemory, State, Event):
        if (state, event) not in LEGAL[memory]:
            count += 1
            with pytest.raises(LifetimeError) as caught:
                next_state(memory, state, event, "layers.7", "number 2")
            for told in ("layers.7", "number 2", memory.value, f"cannot be {event.value}", state.value):
                assert told in str(caught.value)
    assert count == 3 * 7 * 8 - 7 - 6 - 4


def test_switch() -> None:
    assert not resolve_check_lifetimes({})
    for value, expected in (("1", True), ("0", False), ("", False)):
        assert resolve_check_lifetimes({"MFSDP_CHECK_LIFETIMES": value}) is expected
    with pytest.raises(ConfigurationError, match="MFSDP_CHECK_LIFETIMES='yes' is not a switch; give 1 or 0"):
        resolve_check_lifetimes({"MFSDP_CHECK_LIFETIMES": "yes"})


# ---- planted faults --------------------------------------------------------------------------------------------------


Fault = Callable[[], Any]


def _reshard_skipped() -> Any:
    original = Scheduler._reshard

    def dropping(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return type(found)(operation for operation in found if operation.action is not Action.RESHARD)

    return mock.patch.object(Scheduler, "_reshard", dropping)


def _released_inside_its_forward() -> Any:
    """The third floor lets go of its own weights."""

    def releasing(self: Floor, x: torch.Tensor) -> torch.Tensor:
        model = MODELS[-1]
        if self is model.module.floors[2]:
            engine_of(model).executor.run((Operation(Action.RESHARD, 3),))
        return x + self.down(torch.relu(self.up(x)))

    return mock.patch.object(Floor, "forward", releasing)


def _slot_given_twice() -> Any:
    """Two units get one memory though neither the scheduler nor the plan says so."""
    original = WeightMemory.borrow

    def one_for_two(self: WeightMemory, unit: int, slot: int | None) -> Block:
        return original(self, unit, 1 if unit in (2, 3) else slot)

    return mock.patch.object(WeightMemory, "borrow", one_for_two)


def _used_block_handed_out() -> Any:
    original = BlockPool.borrow

    def always_the_same(self: BlockPool, num_bytes: int) -> Block:
        return self._made[0] if self._made else original(self, num_bytes)

    return mock.patch.object(BlockPool, "borrow", always_the_same)


def _reduction_never_waited_for() -> Any:
    """A bucket goes back to its pool before its reduction has ended."""
    original = HostCommStream.submit

    def submit(self: HostCommStream, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        return HostWork(None, None) if self._name == "reduce" else work

    return mock.patch.object(HostCommStream, "submit", submit)


def _given_back_twice() -> Any:
    original = Executor.reduce

    def twice(self: Executor, *args: Any) -> None:
        original(self, *args)
        self.in_flight.append(self.in_flight[-1])

    return mock.patch.object(Executor, "reduce", twice)


MODELS: list[MegatronFSDP] = []
"""The model that is trained with a fault."""

FAULTS: dict[str, tuple[Fault, str]] = {
    "a RESHARD skipped": (
        _reshard_skipped,
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


@pytest.mark.full(short=["a RESHARD skipped", "one slot for two units", "a bucket reused before its reduction ended"])
@pytest.mark.parametrize("name", FAULTS)
@on_ranks(2)
def test_faults_are_found_and_the_unit_is_named(name: str) -> None:
    model = _wrapped(is_checked=True)
    MODELS[:] = [model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what hooks raise after that
        with FAULTS[name][0](), pytest.raises(LifetimeError) as caught:
            _train_twice(model)
    for work in [work for unit in engine_of(model).units for work in unit.works]:
        work.wait()
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


@on_ranks(2)
def test_unfilled_parts_of_buckets_are_nan() -> None:
    """Where the engine forgets to clear what no gradient came for: 512 elements of an unused layer, on two ranks."""
    model = _wrapped(is_checked=True)
    original = GradientBuffers.reduce

    def forgetful(self: GradientBuffers, *args: Any) -> Any:
        self.filled[:] = b"\1" * len(self.filled)
        return original(self, *args)

    x = torch.ones(2, TOWER_FEATURES)
    with mock.patch.object(GradientBuffers, "reduce", forgetful):
        floor = model.module.floors[4]
        with mock.patch.object(floor, "forward", lambda x: x + floor.down(floor.down.weight.new_ones(1, 32))):
            tower_loss(model, x).backward()
    mains = [group.gradients.main.local for group in model.parameter_groups() if group.gradients is not None]
    assert sum(of_ranks(sum(int(main.isnan().sum()) for main in mains))) == 512


FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def test_poison_is_nan_in_every_floating_dtype_and_empty_blocks_stay_empty() -> None:
    block = Block(64, torch.device("cpu"))
    block.poison()
    for dtype in FLOATING:
        assert block.view(0, 64 // dtype.itemsize, dtype).float().isnan().all()
    block.empty()
    block.poison()
    assert block.held_bytes == 0
