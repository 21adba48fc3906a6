"""FSDP 2 x CP 2 on a transformer whose ranks share the tokens of every sequence equals one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, flattened, mesh_of
from tests.support.case import (
    SAMPLES,
    Scenario,
    Setting,
    adamw_above_noise,
    check_strategies,
    defer_two_of_three,
    mean_over_all_tokens,
    tokens_in,
    two_steps,
)
from tests.support.zoo import DENSE, Batch, build_dense, divide_context, gappy_case, make_gappy_token_batch

UNEVEN = gappy_case(build_dense)
"""Ranks have different numbers of tokens, so that a mean of means would be wrong."""


def mesh() -> DeviceMesh:
    return mesh_of((dist.get_world_size() // 2, 2), ("dp", "cp"))


def arguments() -> dict[str, Any]:
    """Gradients are averaged over data-parallel and context-parallel ranks alike: one flattened dimension."""
    flattened(mesh(), ("dp", "cp"), "dp_cp")
    return {"device_mesh": mesh(), "dp_shard_dim": "dp_cp"}


def hybrid_mesh() -> DeviceMesh:
    return mesh_of((2, 1, 2), ("dp_outer", "dp", "cp"))


def hybrid_arguments() -> dict[str, Any]:
    """Sharded over the ranks that share sequences, replicated over those that share samples."""
    flattened(hybrid_mesh(), ("dp", "cp"), "dp_cp")
    group = flattened(hybrid_mesh(), ("dp_outer", "dp", "cp"), "dp_all").get_group()
    axes = {"dp_outer_dim": "dp_outer", "dp_shard_dim": "dp_cp"}
    return {"device_mesh": hybrid_mesh(), "hybrid_fsdp_group": group, **axes}


def place(model: nn.Module) -> None:
    divide_context(model, mesh()["cp"].get_group())


def part(whole: Batch) -> Batch:
    return place_of(whole, dist.get_rank())


def place_of(whole: Batch, rank: int) -> Batch:
    """Samples by the data-parallel rank, and of each the tokens by the context-parallel rank; of four ranks."""
    samples, context = whole.part(rank // 2, 2), rank % 2
    inputs, targets = (values.chunk(2, dim=1)[context].contiguous() for values in (samples.inputs, samples.targets))
    return Batch(inputs, targets)


ARRANGEMENT = Arrangement("context parallel", arguments, place, part)
HYBRID = Arrangement("hybrid and context parallel", hybrid_arguments, place, part)


# ---- parity ----------------------------------------------------------------------------------------------------------


def test_gradients_are_averaged_over_data_and_context_parallel_ranks(run_ranks: RunRanks) -> None:
    settings = [Setting(inner, arrangement=ARRANGEMENT) for inner in (0, 3)]
    settings += [Setting(3, average_in_collective=True, arrangement=ARRANGEMENT)]
    check_strategies(run_ranks, 4, Scenario(two_steps, DENSE, adamw_above_noise), settings)


def test_accumulation_equals_one_process(run_ranks: RunRanks) -> None:
    settings = [Setting(inner, one_call=False, arrangement=ARRANGEMENT) for inner in (1, 2)]
    check_strategies(run_ranks, 4, Scenario(defer_two_of_three, DENSE), settings)


@pytest.mark.full
def test_hybrid_sharding_of_context_parallel_ranks_equals_one_process(run_ranks: RunRanks) -> None:
    pairs = ((1, 0), (3, 1))
    settings = [Setting(inner, outer_strategy=outer, arrangement=HYBRID) for inner, outer in pairs]
    check_strategies(run_ranks, 4, Scenario(two_steps, DENSE, adamw_above_noise), settings)


def test_per_token_losses_are_summed_over_uneven_ranks(run_ranks: RunRanks) -> None:
    whole = make_gappy_token_batch(SAMPLES, torch.Generator().manual_seed(0))
    assert len({tokens_in(place_of(whole, rank)) for rank in range(4)}) > 2
    settings = [Setting(inner, per_token=True, arrangement=ARRANGEMENT) for inner in (0, 3)]
    settings += [Setting(3, per_token=True, outer_strategy=1, arrangement=HYBRID)]
    check_strategies(run_ranks, 4, Scenario(mean_over_all_tokens, UNEVEN), settings)
