"""FSDP 2 x TP 2 on a transformer that torch's `parallelize_module` has divided equals one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError
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
from tests.support.on_ranks import engine_of, fixed_seed, on_ranks, same_on_ranks
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


class ScaleOfParts(nn.Module):
    """A parameter between a column-wise and a row-wise layer; `sums` says what each rank's gradient is."""

    def __init__(self, mesh: DeviceMesh, *, sums: bool) -> None:
        super().__init__()
        self.gradient = Partial() if sums else Replicate()
        self.scale = nn.Parameter(distribute_tensor(torch.ones(1), mesh, [Replicate()]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.scale, DTensor)
        return inputs * self.scale.to_local(grad_placements=[self.gradient])


def scaled(mesh: DeviceMesh, *, sums: bool) -> nn.Module:
    with fixed_seed(0):
        model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model[1] = ScaleOfParts(mesh, sums=sums)
    return model


@on_ranks(4)
def test_the_first_backward_finds_a_gradient_of_which_ranks_have_a_part() -> None:
    """Under no_sync and in microbatches, too; nothing is compared later, and nobody waits where nothing is whole."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    for sums in (True, False):
        model = fully_shard_model(scaled(mesh["tp"], sums=sums), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")
        with model.no_sync():
            loss = model(torch.ones(3, 4)).square().sum()
            if sums:
                loss.backward()
                assert not engine_of(model).gradient_checks
                continue
            with pytest.raises(ConfigurationError) as raised:
                loss.backward()
        text = same_on_ranks(str(raised.value))
        assert text.startswith("1 parameters are whole on every tensor-parallel rank, but their gradients differ")
        assert "1.scale (norms from" in text
    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    whole = fully_shard_model(model, device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")
    whole(torch.ones(3, 4)).sum().backward()
