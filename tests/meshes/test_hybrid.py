"""HSDP and HFSDP equal one process on the whole batch: losses, gradients and the first three updates.

Each (mesh, inner and outer strategy) trains some models of the zoo; scripts, optimizers and ways to call are dealt out.
"""

import math
from collections.abc import Callable

import pytest
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from tests.conftest import RunRanks
from tests.engine.test_parity import BF16, adamw, three_microbatches
from tests.engine.test_parity_accumulation import say_which_is_last
from tests.support.arrangements import hybrid
from tests.support.case import (
    FP32,
    OptimizerFn,
    Run,
    Scenario,
    Setting,
    assert_parity,
    check_strategies,
    clip_by_model,
    clip_by_torch,
    defer_two_of_three,
    reference,
    run_sharded,
    sgd,
    three_steps,
)
from tests.support.zoo import MODEL_CASES, Branches, ModelName, vector_case

MESHES = ((2, 2), (4, 1), (2, 1))
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


@pytest.mark.full(short=["mesh2"])
@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_one_process_on_the_whole_batch(run_ranks: RunRanks, mesh: tuple[int, int]) -> None:
    jobs = jobs_of(mesh)
    by_rank = run_ranks(math.prod(mesh), run_sharded, [(scenario, setting) for _, scenario, setting in jobs])
    for (name, scenario, setting), *outcomes in zip(jobs, *by_rank, strict=True):
        try:
            assert_parity(outcomes, reference(scenario), BF16 if name == "bf16_fp32_norm" else FP32)
        except AssertionError as error:
            raise AssertionError(f"{name}, {scenario.script.__name__}, {setting}: {error}") from None


# ---- when gradients are synchronised ---------------------------------------------------------------------------------


def switch_auto_sync(run: Run) -> None:
    """The loop of the published package's users."""
    for step in range(3):
        for microbatch in range(3):
            if run.sharded is not None:
                run.sharded.set_model_auto_sync(microbatch == 2)
            (run.loss(10 * step + microbatch) / 3).backward()
        run.step()


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


WAYS = (switch_auto_sync, say_which_is_last, defer_two_of_three, let_the_optimizer_synchronise, mix_every_way)


@pytest.mark.full(short=["let_the_optimizer_synchronise", "mix_every_way"])
@pytest.mark.parametrize("script", WAYS)
def test_every_way_to_accumulate_gives_the_sum(run_ranks: RunRanks, script: Callable[[Run], None]) -> None:
    settings = {let_the_optimizer_synchronise: EACH[1::2], mix_every_way: EACH[::2]}.get(script, EACH)
    check_strategies(run_ranks, 4, Scenario(script, MODEL_CASES["odd_shapes"], adamw), settings)


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


def summed_over_ranks(run: Run) -> None:
    """Without a factor the gradient is the sum over the ranks, each of which divides by what it knows of all."""
    for step in range(2):
        (run.loss(step) / (1 if run.sharded is None else run.num_ranks)).backward()
        run.step()


def test_per_token_losses_are_summed_without_a_factor(run_ranks: RunRanks) -> None:
    settings = [
        Setting(inner, per_token=True, outer_strategy=outer, arrangement=hybrid(2, 2))
        for inner, outer in ((0, 0), (2, 0), (3, 1))
    ]
    check_strategies(run_ranks, 4, Scenario(summed_over_ranks, MODEL_CASES["odd_shapes"]), settings)
