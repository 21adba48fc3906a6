"""Ranks that start from different weights are found, constants included."""

import warnings

import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from tests.conftest import RunRanks


def constants_per_rank() -> tuple[list[float], list[str]]:
    norm = nn.LayerNorm(4)
    nn.init.constant_(norm.weight, float(dist.get_rank() + 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard_model(norm)
    return model.full_parameters()["weight"].tolist(), [str(warning.message) for warning in caught]


def test_a_norm_that_each_rank_filled_otherwise_is_found(run_ranks: RunRanks) -> None:
    """An exclusive or of an even number of equal elements is 0 whatever they are."""
    for weight, messages in run_ranks(2, constants_per_rank):
        assert weight == [1.0] * 4
        assert any("differed between ranks" in message and "weight" in message for message in messages)
