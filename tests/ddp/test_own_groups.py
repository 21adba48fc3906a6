"""Overlapping buckets travel over own groups, so that collectives of the model cannot swap places with them."""

from __future__ import annotations

import copy
import gc
import operator
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.comm.groups import timeout_of
from megatron_fsdp.ddp import DistributedOptimizer
from tests.support.doors import in_buckets
from tests.support.on_ranks import engine_of, on_ranks
from tests.support.settling import settled

REDUCING: dict[str, Any] = {"overlap_grad_reduce": True, "bucket_size": 1}
GATHERING: dict[str, Any] = {**REDUCING, "use_distributed_optimizer": True, "overlap_param_gather": True}
STEPS = 4


class OverRanks(torch.autograd.Function):
    """The mean over the ranks of the default group, also in backward, as SyncBatchNorm makes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        mean = x.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


class Speaking(nn.Module):
    """Means over ranks between layers, whose weights have as many elements as the means; one layer may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor, uses_third: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index != 2 or uses_third else x
            x = OverRanks.apply(x) if index < 2 else x
        return x


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_collectives_of_the_model_do_not_meet_those_of_buckets() -> None:
    """From a model of this process alone, over some steps; ranks other than the first skip a layer after one step."""
    torch.manual_seed(0)
    alone = Speaking()
    model = in_buckets(copy.deepcopy(alone), REDUCING)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    rank, worst = dist.get_rank(), 0.0
    for step in range(STEPS):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(77 * step + rank))
        uses_third = step == 0 or rank == 0
        model(batch, uses_third).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        alone(batch, uses_third).square().mean().backward()
        for param in alone.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        reference.step()
        reference.zero_grad()
        for mine, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
            worst = max(worst, (mine.full_tensor() - expected).abs().max().item())
    assert worst < 1e-7


def wrap(fields: Mapping[str, Any]) -> DistributedDataParallel:
    return in_buckets(nn.Linear(3, 3), fields)


def live() -> tuple[int, int, int]:
    """Process groups that torch knows, threads and open files (sockets among them) of this process."""
    return (
        len(distributed_c10d._world.pg_map),
        len(list(Path("/proc/self/task").iterdir())),
        len(list(Path("/proc/self/fd").iterdir())),
    )


@pytest.mark.full(short=["replicated-1", "sharded-2", "reductions-2", "gathers-2"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 0), ({"use_distributed_optimizer": True}, 0), (REDUCING, 1), (GATHERING, 1)],
    ids=["replicated", "sharded", "reductions", "gathers"],
)
@on_ranks()
def test_only_what_overlaps_has_a_group_of_its_own(fields: Mapping[str, Any], expected: int, num_ranks: int) -> None:
    wrap({})  # whatever the first wrap of a process makes
    before = live()[0]
    model = wrap(fields)
    assert live()[0] - before == (expected if num_ranks > 1 else 0)
    del model


@on_ranks(2)
def test_an_own_group_is_like_the_original() -> None:
    """Backend, ranks, place and timeout are those of the mesh's group."""
    parent = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    assert parent is not None
    mesh = dist.DeviceMesh.from_group(parent, "cpu", mesh_dim_names=("dp",))
    model = DistributedDataParallel(DistributedDataParallelConfig(**REDUCING), nn.Linear(3, 3), mesh)
    axis = model.parameter_groups()[0].plan.axes[-1]
    assert axis.group is not None
    assert axis.group is not parent
    for of_group in (dist.get_backend, dist.get_process_group_ranks, dist.get_rank):
        assert of_group(axis.group) == of_group(parent)
    assert axis.rank == dist.get_rank(parent)
    assert timeout_of(axis.group) == timedelta(seconds=77)
    assert axis.traffic is engine_of(model).traffic_by_axis["dp"]
    del model, axis
    dist.destroy_process_group(parent)


@pytest.mark.full
@on_ranks(2)
def test_models_one_after_another_leave_no_group_thread_or_socket() -> None:
    first: tuple[int, ...] = ()
    for _ in range(30):
        model = wrap(GATHERING)
        model(torch.ones(2, 3)).sum().backward()
        del model
        gc.collect()
        first = first or live()
    last = settled(live, lambda now: all(map(operator.le, now, first)))
    assert all(map(operator.le, last, first)), (first, last)
