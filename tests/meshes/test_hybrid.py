"""HSDP and HFSDP equal one process on the whole batch: losses, gradients and the first three updates.

Each (mesh, inner and outer strategy) trains some models of the zoo; scripts, optimizers and ways to call are dealt out.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from tests.conftest import RunRanks
from tests.engine.test_parity import BF16, adamw, three_microbatches
from tests.engine.test_parity_accumulation import say_which_is_last
from tests.support.arrangements import hybrid, hybrid_arguments
from tests.support.case import (
    FP32,
    OptimizerFn,
    Run,
    Scenario,
    Setting,
    check_jobs,
    check_strategies,
    clip_by_model,
    clip_by_torch,
    defer_two_of_three,
    sgd,
    three_steps,
)
from tests.support.on_ranks import on_ranks
from tests.support.zoo import MODEL_CASES, Branches, ModelName, vector_case

MESHES = ((2, 2), (2, 1))
"""Outer times inner ranks."""

STRATEGIES = ((0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1))
"""Inner, outer."""

HSDP, HFSDP = Setting(3, arrangement=hybrid(2, 2)), Setting(3, outer_strategy=1, arrangement=hybrid(2, 2))
EACH = tuple(Setting(inner, outer_strategy=outer, arrangement=hybrid(2, 2)) for inner, outer in STRATEGIES)

_OWN_DTYPES = MixedPrecisionPolicy(main_params_dtype=None)


SCRIPTS = (three_steps, three_microbatches)
OPTIMIZERS: tuple[OptimizerFn, ...] = (sgd, adamw)


def jobs_of(mesh: tuple[int, int]) -> list[tuple[ModelName, Scenario, Setting]]:
    """Three models under every pair of strategies on the square mesh, two on the others."""
    names = list(MODEL_CASES)
    count = 3 if mesh == (2, 2) else 2
    jobs = []
    for turn, (inner, outer) in enumerate(STRATEGIES):
        for position in range(count):
            name = names[(position * (len(names) // count) + turn + MESHES.index(mesh)) % len(names)]
            script = SCRIPTS[(position + turn) % 2]
            optimizer = OPTIMIZERS[(position // 2 + turn) % 2]
            policy = _OWN_DTYPES if name in ("fp32_fp64_norm", "bf16_fp32_norm") else MixedPrecisionPolicy()
            setting = Setting(
                inner, policy, (turn // 2 + position) % 2 == 0, outer_strategy=outer, arrangement=hybrid(*mesh)
            )
            jobs.append((name, Scenario(script, MODEL_CASES[name], optimizer), setting))
    return jobs


@pytest.mark.full(short=["mesh1"])
@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_one_process_on_the_whole_batch(run_ranks: RunRanks, mesh: tuple[int, int]) -> None:
    names, *jobs = zip(*jobs_of(mesh), strict=True)
    tolerances = [BF16 if name == "bf16_fp32_norm" else FP32 for name in names]
    check_jobs(run_ranks, math.prod(mesh), list(zip(*jobs, strict=True)), tolerances)


# ---- when gradients are synchronised ---------------------------------------------------------------------------------


def let_the_optimizer_synchronise(run: Run) -> None:
    """What is scaled meanwhile waits for the outer ranks."""
    if run.sharded is not None:
        run.sharded.set_model_auto_sync(False)
    for step in range(3):
        run.loss(2 * step).backward()
        run.scale(0.5)
        run.loss(2 * step + 1).backward()
        run.optimizer.step()
        run.note_gradients()
        run.note_parameters()
        run.optimizer.zero_grad()


def mix_every_way(run: Run) -> None:
    """Visible gradients, deferred ones, clipped ones and visible ones again add up; nothing is zeroed between."""
    run.loss(0).backward()
    run.note_gradients("first")
    with run.no_sync():
        run.loss(1).backward()
    run.loss(2).backward()
    run.note_gradients("second")
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
    run.train(3)
    run.loss(4).backward()
    run.optimizer.zero_grad()
    run.train(5)


WAYS = (say_which_is_last, defer_two_of_three, let_the_optimizer_synchronise, mix_every_way)


@pytest.mark.full(short=["let_the_optimizer_synchronise", "mix_every_way"])
@pytest.mark.parametrize("script", WAYS)
def test_every_way_to_accumulate_gives_the_sum(run_ranks: RunRanks, script: Callable[[Run], None]) -> None:
    check_strategies(
        run_ranks, 4, Scenario(script, MODEL_CASES["odd_shapes"], adamw), EACH[WAYS.index(script) % 2 :: 2]
    )


def use_a_branch_on_one_rank(run: Run) -> None:
    """No rank uses a branch in the first step, one in the second, others in the third."""
    for step, users in enumerate(((), (3,), (0, 2))):
        for rank in run.ranks_here:
            for layer in run.module.layers:  # type: ignore[union-attr]
                layer.branch = "even" if rank in users else None
            run.backward_of(rank, step)
        run.step()


def test_parameters_that_only_some_outer_or_inner_ranks_use(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 4, Scenario(use_a_branch_on_one_rank, vector_case(Branches), adamw), (HSDP, HFSDP))


# ---- one value over all ranks ----------------------------------------------------------------------------------------


@pytest.mark.full(short=["clip_by_model"])
@pytest.mark.parametrize("script", [clip_by_model, clip_by_torch])
def test_clipping_equals_one_process(run_ranks: RunRanks, script: Callable[[Run], None]) -> None:
    check_strategies(run_ranks, 4, Scenario(script, MODEL_CASES["scalars"]), EACH[::2])


def test_averaging_in_the_collectives_gives_the_same_mean(run_ranks: RunRanks) -> None:
    settings = [
        Setting(inner, average_in_collective=True, outer_strategy=outer, arrangement=hybrid(2, 2))
        for inner, outer in ((0, 0), (2, 1), (3, 0))
    ]
    check_strategies(run_ranks, 4, Scenario(three_microbatches, MODEL_CASES["odd_shapes"]), settings)


# ---- precision -------------------------------------------------------------------------------------------------------


POLICIES = (
    MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
    MixedPrecisionPolicy(grad_comm_dtype=torch.float16),
    MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16),
    MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float64),
)


def weights_of_three_steps(run: Run) -> None:
    """Three steps of two microbatches; notes weights in float32."""
    for step in range(3):
        for microbatch in range(2):
            (run.loss(2 * step + microbatch) / 2).backward()
        run.optimizer.step()
        values = run.sharded.full_parameters() if run.sharded is not None else dict(run.model.named_parameters())
        run.note("weights", {name: value.float() for name, value in values.items()})
        run.optimizer.zero_grad()


@pytest.mark.full(short=["policy0"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_hold_over_both_axes(run_ranks: RunRanks, policy: MixedPrecisionPolicy) -> None:
    """Narrow dtypes of gradients round them; wide ones change nothing."""
    strategies = ((0, 0), (3, 0), (3, 1))
    settings = [Setting(inner, policy, outer_strategy=outer, arrangement=hybrid(2, 2)) for inner, outer in strategies]
    is_narrow = {torch.bfloat16, torch.float16} & {policy.grad_comm_dtype, policy.main_grads_dtype}
    scenario = Scenario(weights_of_three_steps, MODEL_CASES["odd_shapes"])
    check_strategies(run_ranks, 4, scenario, settings, BF16 if is_narrow else FP32)


LARGE = 40_000.0
"""Two of these are more than float16 can hold (65504)."""


@on_ranks(4)
def test_a_mean_that_fits_into_float16_is_not_lost_on_the_way() -> None:
    found = {}
    for inner, outer in STRATEGIES:
        model = fully_shard_model(
            nn.Linear(4, 4, bias=False),
            zero_dp_strategy=inner,
            outer_dp_sharding_strategy=outer,
            fsdp_unit_modules=[],
            mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=torch.float16),
            average_in_collective=True,
            **hybrid_arguments(2, dist.get_world_size() // 2),
        )
        (LARGE * model(torch.ones(1, 4)).sum()).backward()
        (gradient,) = model.full_gradients().values()
        assert gradient is not None
        found[inner, outer] = gradient.mean().item()
    assert found == pytest.approx(dict.fromkeys(STRATEGIES, LARGE), rel=1e-3)
