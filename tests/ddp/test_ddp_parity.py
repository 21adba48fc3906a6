"""Buckets equal one process on the whole batch: losses, every gradient, the first three updates."""

from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from tests.conftest import RunRanks
from tests.engine.test_parity import OPTIMIZERS, SCRIPTS
from tests.support.case import (
    FP32,
    ONE_RANK,
    DdpSetting,
    Job,
    Scenario,
    Tolerance,
    check_jobs,
    ddp,
    defer_two_of_three,
    three_steps,
)
from tests.support.zoo import ATTENTION, ENCODER, MODEL_CASES, READING, ModelCase, Nested, Recomputed, vector_case

RANKS = (1, 2, 3, 4)
_BF16 = Tolerance(rtol=2**-5, atol=2**-6)

CASES: dict[str, ModelCase] = {
    **MODEL_CASES,
    "attention": ATTENTION,
    "encoder": ENCODER,
    "reading": READING,
    "nested": vector_case(Nested),
}

BUCKETS: tuple[dict[str, Any], ...] = (
    {"bucket_size": 1},
    {"bucket_size": 60},
    {"num_buckets": 3},
    {"bucket_size": 10_000_000},
    {},
)
GATHERS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_param_gather": True},
    {"overlap_param_gather": True, "align_param_gather": True},
)


WAYS = ((False, False), (False, True), (True, False), (True, True))
"""use_distributed_optimizer, overlap_grad_reduce."""

_OPTIMIZERS = (OPTIMIZERS[0], OPTIMIZERS[1], OPTIMIZERS[3])
"""RMSprop is left out: it divides by a tenth of the gradient, so rounding of 1e-8 shows."""


def setting_of(way: int, turn: int, own_dtypes: bool) -> DdpSetting:
    """One of the four ways; the other fields are dealt out by turn."""
    shards, overlaps = WAYS[way]
    dtypes: dict[str, Any] = {"megatron_fsdp_main_params_dtype": None} if own_dtypes else {}
    return ddp(
        connects=turn % 3 != 0,
        use_distributed_optimizer=shards,
        overlap_grad_reduce=overlaps,
        average_in_collective=turn % 4 == 1,
        gradient_reduce_div_fusion=turn % 5 != 2 or turn % 4 == 1,  # a collective that averages divides by itself
        **BUCKETS[(turn // 2 + turn) % len(BUCKETS)],
        **(GATHERS[turn // 2 % len(GATHERS)] if shards else {}),
        **dtypes,
    )


def jobs_of(num_ranks: int) -> list[tuple[str, Scenario, DdpSetting]]:
    """What so many ranks train: every model in two of the ways, the other two with one rank more."""
    jobs = []
    for position, (name, case) in enumerate(CASES.items()):
        own_dtypes = name in ("fp32_fp64_norm", "bf16_fp32_norm")
        for number in range(2):
            turn = 2 * position + 5 * num_ranks + number
            setting = setting_of((num_ranks + position + 2 * number) % 4, turn, own_dtypes)
            script = SCRIPTS[(position + number + num_ranks // 2) % 2][(position + num_ranks) // 2 % 2]
            jobs.append((name, Scenario(script, case, _OPTIMIZERS[turn % len(_OPTIMIZERS)]), setting))
    return jobs


def _tolerance(name: str, num_ranks: int) -> Tolerance:
    if num_ranks == 1:
        return ONE_RANK
    return _BF16 if name == "bf16_fp32_norm" else FP32


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_training_equals_one_process_on_the_whole_batch(run_ranks: RunRanks, num_ranks: int) -> None:
    by_tolerance: dict[Tolerance, list[Job]] = defaultdict(list)
    for name, scenario, setting in jobs_of(num_ranks):
        by_tolerance[_tolerance(name, num_ranks)].append((scenario, setting))
    for tolerance, jobs in by_tolerance.items():
        check_jobs(run_ranks, num_ranks, jobs, tolerance)


# ---- the fully sharded engine, and several instances of the optimizer ------------------------------------------------


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_units_under_every_strategy(run_ranks: RunRanks, num_ranks: int) -> None:
    jobs = [
        (
            Scenario(three_steps, MODEL_CASES[name]),
            ddp(
                use_megatron_fsdp=True,
                data_parallel_sharding_strategy=strategy,
                use_distributed_optimizer=number == 2,
                overlap_grad_reduce=number % 2 == 0,
            ),
        )
        for name in ("tied", "scalars")
        for number, strategy in enumerate(STRATEGIES)
    ]
    check_jobs(run_ranks, num_ranks, jobs, ONE_RANK if num_ranks == 1 else FP32)


DELAYED: dict[str, ModelCase] = {
    "tied": MODEL_CASES["tied"],
    "nested": vector_case(Nested),
    "recomputed": vector_case(partial(Recomputed, "units", reentrant=False)),
    "reentrant": vector_case(partial(Recomputed, "pairs", reentrant=True)),
}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", DELAYED)
def test_delayed_weight_gradients_of_units_equal_one_process(run_ranks: RunRanks, name: str, strategy: str) -> None:
    setting = ddp(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy, delay_wgrad_compute=True)
    check_jobs(run_ranks, 2, [(Scenario(defer_two_of_three, DELAYED[name], OPTIMIZERS[1]), setting)])


def reductions_and_buckets(strategy: str, is_delayed: bool) -> tuple[int, int, int, list[bool]]:
    """Reductions and bytes of one backward, the most that buckets took, and whether linears reached theirs early."""
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        delay_wgrad_compute=is_delayed,
    )
    model = DistributedDataParallel(
        config, nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), fsdp_unit_modules=[nn.Linear]
    )
    early: list[bool] = []
    inputs = torch.ones(2, 4, requires_grad=True)
    held = [each for group in model.parameter_groups() if group.gradients for each in group.gradients.of_parameter]
    inputs.register_hook(lambda _grad: early.extend(each.filled for each in held))
    before = model.traffic()
    model(inputs).sum().backward()
    sent = model.traffic().since(before)
    return sent.reductions, sent.reduce_bytes, model.memory().transient_peak_bytes, early


@pytest.mark.unmerged
@pytest.mark.full(short=["optim_grads_params"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_delayed_units_are_reduced_once_each_out_of_two_buckets(run_ranks: RunRanks, strategy: str) -> None:
    usual, delayed = (run_ranks(2, reductions_and_buckets, strategy, found)[0] for found in (False, True))
    assert delayed[:3] == usual[:3]
    assert usual[0] == 6
    assert (any(usual[3]), any(delayed[3])) == (True, False)


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "instances"), [(4, 2), (2, 2), (4, 4)])
def test_several_instances_of_the_optimizer(run_ranks: RunRanks, num_ranks: int, instances: int) -> None:
    several: dict[str, Any] = {"num_distributed_optimizer_instances": instances}
    buckets = [
        ddp(
            use_distributed_optimizer=True,
            overlap_grad_reduce=number != 1,
            average_in_collective=number == 1,
            bucket_size=(60, 500, 1)[number],
            **several,
            **gathers,
        )
        for number, gathers in enumerate(GATHERS)
    ]
    jobs = [
        (Scenario(SCRIPTS[1][0], CASES[name], OPTIMIZERS[1]), setting)
        for name, setting in zip(("odd_shapes", "transformer", "scalars"), buckets, strict=True)
    ]
    pairs = [("optim_grads_params", "optim")]
    if (num_ranks, instances) != (4, 2):
        pairs = [("no_shard", "no_shard"), ("optim", "optim"), ("optim_grads_params", "no_shard")]
        pairs += [("optim_grads", "optim")]
    for inner, outer in pairs:
        setting = ddp(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=inner,
            outer_dp_sharding_strategy=outer,
            **several,
        )
        jobs.append((Scenario(SCRIPTS[1][0], CASES["odd_shapes"], OPTIMIZERS[1]), setting))
    check_jobs(run_ranks, num_ranks, jobs)
