"""What hybrid sharding sends on which axis, how often, and what it holds, by hand-made sums.

The tower has 8 units of 1024 parameters and a root of 512, which 4 ranks divide without padding. P is their sum, N = 2
inner and M = 2 outer ranks.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy
from megatron_fsdp.ddp.distributed_optimizer import gathers_beside_main_weights
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid, hybrid_arguments
from tests.support.case import Run, Scenario, Setting, adamw_above_noise, check_strategies, full_of, shard
from tests.support.counting import ALL_REDUCE, EXCHANGE, GATHER, OpCounts
from tests.support.on_ranks import on_ranks
from tests.support.zoo import (
    FLOOR_NUMEL,
    FLOORS,
    ROOT_NUMEL,
    Floor,
    ModelCase,
    Tower,
    make_vector_batch,
    tower_loss,
    tower_step,
    vector_loss,
)

pytestmark = pytest.mark.unmerged

UNITS = FLOORS + 1
P = ROOT_NUMEL + FLOORS * FLOOR_NUMEL
REGATHERED = (FLOORS - 2) * FLOOR_NUMEL
"""Two floors stay gathered at a time, so the last two of forward are the first two of backward."""

FP32, BF16 = 4, 2
STRATEGIES = ((3, 0), (3, 1))


def backwards(model: MegatronFSDP, x: torch.Tensor, microbatches: int, way: str) -> None:
    for microbatch in range(microbatches):
        is_last = microbatch == microbatches - 1
        if way in ("set_auto_sync", "leave_it_to_the_optimizer"):
            model.set_model_auto_sync(is_last and way == "set_auto_sync")
        with model.no_sync() if way == "no_sync" and not is_last else nullcontext():
            tower_loss(model, x).backward()


def tower(inner: int, outer: int, dtype: torch.dtype = torch.float32) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    options = {"zero_dp_strategy": inner, "outer_dp_sharding_strategy": outer, "fsdp_unit_modules": [Floor]}
    return shard(Tower().to(dtype), adamw_above_noise, **options, **hybrid_arguments(2, 2))


@pytest.mark.full(short=["1-leave_it_to_the_optimizer-3", "0-no_sync-3", "1-plain-3"])
@pytest.mark.parametrize(
    ("outer", "way", "microbatches"),
    [
        (0, "set_auto_sync", 3),
        (1, "leave_it_to_the_optimizer", 3),
        (0, "no_sync", 3),
        (1, "plain", 3),
        (0, "plain", 1),
    ],
)
@on_ranks(4)
def test_a_steady_step_uses_the_outer_axis_once_and_the_inner_one_as_without_outer_ranks(
    outer: int, way: str, microbatches: int
) -> None:
    """HSDP: 2P/N times (M - 1)/M elements in one all-reduce per unit. HFSDP: half of it each way, gradients out, new
    weights back. A plain loop shows gradients after each backward.

    Inside, at most 3P times (N - 1)/N elements: weights once per pass that has to, gradients once, or once less
    deferred. Nothing else is sent.
    """
    mesh = hybrid_arguments(2, 2)["device_mesh"]
    inner_group, outer_group = mesh["dp_shard"].get_group(), mesh["dp_outer"].get_group()
    model, optimizer = tower(3, outer)
    for _ in range(2):
        with OpCounts() as counts:
            backwards(model, torch.ones(2, 16), microbatches, way)
            optimizer.step()
            optimizer.zero_grad()
    syncs = microbatches if way == "plain" else 1
    sums, exchanges = counts.on(outer_group, ALL_REDUCE), counts.on(outer_group, EXCHANGE)
    outer_gathers = counts.on(outer_group, GATHER)
    if outer:
        assert (sums, exchanges) == ((0, 0), (syncs * UNITS, syncs * (P // 2) // 2 * FP32))
        assert outer_gathers == (UNITS, (P // 2) // 2 * FP32)
    else:
        assert (sums, exchanges) == ((syncs * UNITS, syncs * (2 * P // 2) // 2 * FP32), (0, 0))
        assert outer_gathers == (0, 0)
    gathers, reductions = counts.on(inner_group, GATHER), counts.on(inner_group, EXCHANGE, ALL_REDUCE)
    assert len(counts.sent) == sum(calls for calls, _ in (gathers, reductions, outer_gathers, exchanges, sums))
    if microbatches == 1:
        gathered = P + REGATHERED
        assert gathered + P <= 3 * P
        assert gathers == (UNITS + FLOORS - 2, gathered // 2 * FP32)
    if way != "leave_it_to_the_optimizer":
        reduced = 1 if way == "no_sync" else microbatches
        assert reductions == (reduced * UNITS, reduced * P // 2 * FP32)


@pytest.mark.parametrize(("inner", "outer"), STRATEGIES)
@on_ranks(4)
def test_outer_reductions_are_under_way_while_inner_ones_are_issued(inner: int, outer: int) -> None:
    mesh = hybrid_arguments(2, 2)["device_mesh"]
    inner_group, outer_group = (mesh[name].get_group().group_name for name in ("dp_shard", "dp_outer"))
    model, optimizer = tower(inner, outer)
    for _ in range(2):
        with OpCounts() as counts:
            tower_step(model, optimizer, torch.ones(2, 16))
    reductions = [group for group, name, _ in counts.sent if name in (EXCHANGE, ALL_REDUCE)]
    assert reductions.count(outer_group) == UNITS
    last_inner = len(reductions) - 1 - reductions[::-1].index(inner_group)
    # All but those of the units that are the last to be reduced inside.
    assert reductions[:last_inner].count(outer_group) >= UNITS - 3


@pytest.mark.full(short=["2-0", "3-1"])
@pytest.mark.parametrize(("inner", "outer"), [(0, 0), (2, 0), (1, 1), (3, 1)])
@on_ranks(4)
def test_persistent_bytes_are_those_of_the_formulas(inner: int, outer: int) -> None:
    """bf16 weights and gradients, float32 main weights and Adam; M outer ranks divide what the optimizer holds only."""
    n, m = 2, 2
    model, optimizer = tower(inner, outer, torch.bfloat16)
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


# ---- weights that are written between a step and the next forward ----------------------------------------------------


POLICIES = {"shared": MixedPrecisionPolicy(main_params_dtype=None), "copied": MixedPrecisionPolicy(torch.float64)}


def layers() -> nn.Module:
    """Large enough for a gather to take a while."""
    return nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))


def step_by_halves_and_clamp(run: Run) -> None:
    """With two optimizers: the second one steps while what the first one changed is on its way."""
    params = list(run.model.parameters())
    halves = [torch.optim.SGD(params[start::2], lr=0.5) for start in range(2)]
    for step in range(3):
        run.backward(step)
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for param in params:
                param.clamp_(-0.03, 0.03)
            run.note("output", {"output": run.model(run.whole_batch(99).inputs)})
        run.note("weights", {name: full_of(param).float() for name, param in run.parameters().items()})  # type: ignore[union-attr]


WIDE = ModelCase(layers, partial(make_vector_batch, features=(200, 200)), vector_loss, (nn.Linear,))
CLAMPED = Scenario(step_by_halves_and_clamp, WIDE)


def setting(strategy: int, policy: MixedPrecisionPolicy) -> Setting:
    """Sharded inside, and main weights over both axes."""
    return Setting(strategy, policy, outer_strategy=1, arrangement=hybrid(2, 2))


@pytest.mark.full(short=["1-shared", "3-copied"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", [1, 3])
def test_writes_after_a_step_are_not_lost(run_ranks: RunRanks, strategy: int, policy: str) -> None:
    check_strategies(run_ranks, 4, CLAMPED, [setting(strategy, POLICIES[policy])])


@on_ranks(4)
def test_nothing_writes_into_weights_between_a_step_and_the_next_forward() -> None:
    """The gather over the outer axis is in place: while it is under way it would undo what others write."""
    run = Run(CLAMPED, setting(3, MixedPrecisionPolicy()))

    def count() -> int:
        assert run.sharded is not None
        return run.sharded.traffic_by_axis()["dp_outer"].gathers

    run.backward(0)
    seen = [count()]
    run.optimizer.step()
    seen.append(count())
    loss = run.loss(1)
    seen.append(count())
    loss.backward()
    seen.append(count())
    assert seen == [0, 0, 6, 6]


@on_ranks(4)
def test_a_gather_that_writes_around_main_weights_may_not_run_between_steps() -> None:
    models = {policy: Run(CLAMPED, setting(3, POLICIES[policy])).model for policy in POLICIES}
    may = {policy: gathers_beside_main_weights(model._engine) for policy, model in models.items()}  # type: ignore[arg-type]
    assert may == {"shared": False, "copied": True}
