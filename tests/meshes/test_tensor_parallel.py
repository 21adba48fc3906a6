"""FSDP 2 x TP 2 on a transformer that torch's `parallelize_module` has divided equals one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.conftest import RunRanks
from tests.support.arrangements import (
    Arrangement,
    Divide,
    divide_tensors,
    divide_tensors_and_sequences,
    mesh_of,
    tensor_parallel,
)
from tests.support.case import (
    Run,
    Scenario,
    Setting,
    adamw_above_noise,
    check_strategies,
    clip_by_model,
    clip_by_torch,
    two_steps,
)
from tests.support.zoo import DENSE

PLANS: tuple[Divide, ...] = (divide_tensors, divide_tensors_and_sequences)
each_plan = pytest.mark.parametrize("divide", PLANS)


# ---- parity ----------------------------------------------------------------------------------------------------------


def accumulate(run: Run) -> None:
    """One backward that is deferred and one that is not, then two that are not."""
    with run.no_sync():
        (run.loss(0) / 2).backward()
    (run.loss(1) / 2).backward()
    run.step()
    for index in (2, 3):
        (run.loss(index) / 2).backward()
    run.step()
    run.train(4)


@pytest.mark.full(short=["divide_tensors_and_sequences-2"])
@pytest.mark.parametrize("inner", [0, 2])
@each_plan
def test_every_strategy_equals_one_process(run_ranks: RunRanks, divide: Divide, inner: int) -> None:
    setting = Setting(inner, one_call=inner % 2 == 0, arrangement=tensor_parallel(divide))
    check_strategies(run_ranks, 4, Scenario(two_steps, DENSE, adamw_above_noise), [setting])


@pytest.mark.full(short=["divide_tensors-3"])
@pytest.mark.parametrize("inner", [1, 3])
@each_plan
def test_accumulation_equals_one_process(run_ranks: RunRanks, divide: Divide, inner: int) -> None:
    setting = Setting(inner, one_call=inner > 1, arrangement=tensor_parallel(divide))
    check_strategies(run_ranks, 4, Scenario(accumulate, DENSE), [setting])


@pytest.mark.full(short=["2-pairs0"])
@pytest.mark.parametrize(("outer", "pairs"), [(2, ((3, 1),)), (1, ((0, 0), (3, 1)))])
def test_hybrid_sharding_of_tensor_parallel_parts_equals_one_process(
    run_ranks: RunRanks, outer: int, pairs: tuple[tuple[int, int], ...]
) -> None:
    """2 outer x 1 inner x 2 tensor-parallel ranks, and 1 x 2 x 2."""
    settings = [
        Setting(inner, outer_strategy=outside, arrangement=tensor_parallel(PLANS[turn % 2], outer))
        for turn, (inner, outside) in enumerate(pairs)
    ]
    check_strategies(run_ranks, 4, Scenario(accumulate, DENSE, adamw_above_noise), settings)


def mesh_with_one_tensor_parallel_rank(is_named: bool) -> dict[str, Any]:
    found = mesh_of((dist.get_world_size(), 1), ("dp_shard", "tp"))
    named = {"tp_dim": "tp"} if is_named else {}
    return {"device_mesh": found, "dp_shard_dim": "dp_shard", **named}


def divided_over_one(model: nn.Module) -> None:
    divide_tensors(model, mesh_of((dist.get_world_size(), 1), ("dp_shard", "tp"))["tp"])


def test_a_tensor_parallel_dimension_of_one_rank_changes_nothing(run_ranks: RunRanks) -> None:
    """Named or not; and with DTensors over it."""
    unnamed, named = (partial(mesh_with_one_tensor_parallel_rank, is_named) for is_named in (False, True))
    found = Arrangement("one tensor-parallel rank", unnamed), Arrangement("DTensors over it", named, divided_over_one)
    check_strategies(run_ranks, 2, Scenario(two_steps, DENSE), [Setting(3, arrangement=each) for each in found])


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.full(short=["clip_by_model"])
@pytest.mark.parametrize("script", [clip_by_model, clip_by_torch])
def test_the_norm_counts_every_element_once(run_ranks: RunRanks, script: Callable[[Run], None]) -> None:
    """Parts are summed over tensor-parallel ranks; what they all hold is not."""
    settings = [Setting(inner, arrangement=tensor_parallel(divide)) for inner, divide in ((0, PLANS[0]), (3, PLANS[1]))]
    check_strategies(run_ranks, 4, Scenario(script, DENSE), settings)
