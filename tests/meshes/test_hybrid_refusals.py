"""Hybrid arguments that make no sense are refused on every rank, in one sentence."""

from typing import Any

import pytest
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError
from tests.support.arrangements import hybrid_arguments
from tests.support.on_ranks import on_ranks, same_on_ranks

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "the optimizer over both axes and nothing inside": (
        {"zero_dp_strategy": 0, "outer_dp_sharding_strategy": 1},
        ("outer_dp_sharding_strategy", "optim", "no_shard"),
    ),
    "gradients over the outer axis": (
        {"outer_dp_sharding_strategy": 2},
        ("outer_dp_sharding_strategy", "optim_grads", '0 or "no_shard"'),
    ),
    "weights over the outer axis": (
        {"outer_dp_sharding_strategy": "optim_grads_params"},
        ("outer_dp_sharding_strategy", "optim_grads_params", '1 or "optim"'),
    ),
    "an unknown outer strategy": ({"outer_dp_sharding_strategy": 4}, ("outer_dp_sharding_strategy=4",)),
    "a truth value": ({"outer_dp_sharding_strategy": True}, ("outer_dp_sharding_strategy=True",)),
    "the outer axis without its group": ({"hybrid_fsdp_group": None}, ("dp_outer_dim", "hybrid_fsdp_group")),
    "the group without the outer axis": ({"dp_outer_dim": None}, ("dp_outer_dim", "hybrid_fsdp_group")),
    "an outer strategy without the outer axis": (
        {"dp_outer_dim": None, "hybrid_fsdp_group": None, "outer_dp_sharding_strategy": 1},
        ("outer_dp_sharding_strategy", "dp_outer_dim"),
    ),
    "an axis that is not there": ({"dp_outer_dim": "replica"}, ("dp_outer_dim='replica'", "'dp_outer'")),
    "the same axis twice": ({"dp_outer_dim": "dp_shard"}, ("dp_shard",)),
    "no mesh": ({"device_mesh": None}, ("device_mesh",)),
}


def refused(arguments: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        fully_shard_model(nn.Linear(3, 3), **arguments)
    return same_on_ranks(str(raised.value))


@on_ranks(2)
def test_nonsense_is_refused_with_the_same_sentence_on_every_rank() -> None:
    for changes, parts in REFUSED.values():
        message = refused(hybrid_arguments(2, 1) | changes)
        for part in parts:
            assert part in message


@on_ranks(2)
def test_a_group_of_other_ranks_is_refused() -> None:
    """The group of the sharding axis alone in place of the group of both."""
    arguments = hybrid_arguments(2, 1)
    message = refused({**arguments, "hybrid_fsdp_group": arguments["device_mesh"]["dp_shard"].get_group()})
    assert "hybrid_fsdp_group is a group of 1 ranks that are not those along the mesh dimensions" in message
    assert "which are [[0, 1]]" in message
