"""FSDP 2 x CP 2 on a transformer whose ranks share the tokens of every sequence equals one process."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, flattened, mesh_of
from tests.support.by_hand import average_over, run_by_hand
from tests.support.models import Batch, ModelCase
from tests.support.parallel_transformer import (
    ParallelBlock,
    build_dense,
    divide_context,
    make_tokens,
    mean_loss,
)
from tests.support.sharded_run import FP32, Run, Scenario, assert_parity, reference

CASE = ModelCase(build_dense, make_tokens, mean_loss, (ParallelBlock,))


def mesh() -> DeviceMesh:
    return mesh_of((dist.get_world_size() // 2, 2), ("dp", "cp"))


def arguments() -> dict[str, Any]:
    """Gradients are averaged over data-parallel and context-parallel ranks alike: one flattened dimension."""
    flattened(mesh(), ("dp", "cp"), "dp_cp")
    return {"device_mesh": mesh(), "dp_shard_dim": "dp_cp"}


def place(model: nn.Module) -> None:
    divide_context(model, mesh()["cp"].get_group())


def part(whole: Batch) -> Batch:
    """Samples by the data-parallel rank, and of each the tokens by the context-parallel rank."""
    samples = whole.part(dist.get_rank() // 2, dist.get_world_size() // 2)
    context = dist.get_rank() % 2
    inputs, targets = (values.chunk(2, dim=1)[context].contiguous() for values in (samples.inputs, samples.targets))
    return Batch(inputs, targets)


ARRANGEMENT = Arrangement("context parallel", arguments, place, part)


def three_steps(run: Run) -> None:
    run.train(0, 1, 2)


def average(model: nn.Module) -> None:
    average_over(model, None, dist.get_world_size())


def test_the_model_divided_without_sharding_equals_one_process(run_ranks: RunRanks) -> None:
    scenario = Scenario(three_steps, CASE)
    outcomes = run_ranks(4, run_by_hand, scenario, ARRANGEMENT, average)
    assert_parity(outcomes, reference(scenario), FP32)
