"""FSDP 2 x TP 2 on a transformer that torch's `parallelize_module` has divided equals one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, mesh_of
from tests.support.by_hand import average_over, run_by_hand
from tests.support.models import Batch, ModelCase
from tests.support.parallel_transformer import ParallelBlock, build_dense, make_tokens, mean_loss
from tests.support.sharded_run import FP32, Run, Scenario, assert_parity, reference
from tests.support.tensor_plans import divide_tensors, divide_tensors_and_sequences

Divide = Callable[[nn.Module, DeviceMesh], None]

CASE = ModelCase(build_dense, make_tokens, mean_loss, (ParallelBlock,))
PLANS: tuple[Divide, ...] = (divide_tensors, divide_tensors_and_sequences)
each_plan = pytest.mark.parametrize("divide", PLANS)


def mesh() -> DeviceMesh:
    """Data parallel times tensor parallel 2 over all ranks."""
    return mesh_of((dist.get_world_size() // 2, 2), ("dp_shard", "tp"))


def arguments() -> dict[str, Any]:
    return {"device_mesh": mesh(), "dp_shard_dim": "dp_shard", "tp_dim": "tp"}


def place(divide: Divide, model: nn.Module) -> None:
    divide(model, mesh()["tp"])


def part(whole: Batch) -> Batch:
    """Ranks of one tensor-parallel group compute the same samples."""
    return whole.part(dist.get_rank() // 2, dist.get_world_size() // 2)


def arrangement(divide: Divide) -> Arrangement:
    return Arrangement(f"tensor parallel, {divide.__name__}", arguments, partial(place, divide), part)


def three_steps(run: Run) -> None:
    run.train(0, 1, 2)


def average(model: nn.Module) -> None:
    average_over(model, mesh()["dp_shard"].get_group(), dist.get_world_size() // 2)


@each_plan
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_model_divided_by_torch_alone_equals_one_process(
    run_ranks: RunRanks, num_ranks: int, divide: Divide
) -> None:
    scenario = Scenario(three_steps, CASE)
    outcomes = run_ranks(num_ranks, run_by_hand, scenario, arrangement(divide), average)
    assert_parity(outcomes, reference(scenario), FP32)
