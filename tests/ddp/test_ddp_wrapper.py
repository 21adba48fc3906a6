"""What `DistributedDataParallel` refuses, what ranks must have in common, and that the configuration stays as it is."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.describe.description import Description
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.simulate import simulated_ranks
from tests.support.arrangements import mesh_of
from tests.support.on_ranks import on_ranks, refusal
from tests.support.zoo import FLOOR_NUMEL, ROOT_NUMEL, TOWER_FEATURES, Ordered, Tower, tower_loss

Fields = dict[str, Any]


@on_ranks(2)
def test_what_cannot_be_honoured_is_refused_in_words() -> None:
    config = DistributedDataParallelConfig()
    linear = nn.Linear(3, 3)
    wrapped = DistributedDataParallel(config, linear)
    shards = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=3)
    averages = DistributedDataParallelConfig(average_in_collective=True)
    unmatched = DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=("nothing.*",))
    fresh, kind = nn.Linear(3, 3), ConfigurationError
    named = {"device_mesh": mesh_of((2,), ("dp_shard",)), "dp_dim": "other"}
    refused: list[tuple[str, Any, Any, Any, Fields]] = [
        ("config is a Linear; DistributedDataParallel takes a Distributed", TypeError, fresh, config, {}),
        ("an object of str was given where a model is wanted", TypeError, config, "model", {}),
        ("the model is sharded already (2 of 2 parameters", kind, config, wrapped, {}),
        ("the model is sharded already", kind, config, linear, {}),
        ("use_megatron_fsdp=True, where buckets are made by", kind, config, fresh, {"fsdp_unit_modules": [nn.Linear]}),
        ("num_distributed_optimizer_instances=3 does not divide the 2 data-parallel ranks", kind, shards, fresh, {}),
        ("average_in_collective=True contradicts", kind, averages, fresh, {"calculate_per_token_loss": True}),
        ("'nothing.*', which matches none of the 2 trainable parameters", kind, unmatched, fresh, {}),
        ("other", kind, config, fresh, named),
        ("has no parameters", kind, config, nn.Identity(), {}),
    ]
    for words, error, first, second, options in refused:
        assert words in refusal(DistributedDataParallel, first, second, error=error, **options)


SHARDS: Fields = {"use_distributed_optimizer": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ({"bucket_size": 50}, {"bucket_size": 60}),
        ({"use_distributed_optimizer": True}, {}),
        (SHARDS, {**SHARDS, "num_distributed_optimizer_instances": 2}),
        (SHARDS, {**SHARDS, "fp8_param_gather": True}),
    ],
)
@on_ranks(2)
def test_ranks_with_other_configurations_are_all_refused(first: Fields, others: Fields) -> None:
    config = DistributedDataParallelConfig(**(first if dist.get_rank() == 0 else others))
    message = refusal(DistributedDataParallel, config, Ordered(), error=ConfigurationError)
    assert any(name in message for name in {**first, **others} if first.get(name) != others.get(name))


def bucketed(config: DistributedDataParallelConfig, steps: int = 0, **arguments: Any) -> Description:
    with simulated_ranks(4, rank=2) as mesh:
        model = DistributedDataParallel(config, Tower(), mesh, **arguments)
        for _ in range(steps):
            tower_loss(model, torch.zeros(2, TOWER_FEATURES)).backward()
        return model.describe()


def test_a_bucketed_model_is_described_without_fields_at_their_defaults() -> None:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=2000)
    described = bucketed(config, steps=1)
    assert described.wrapper == "DistributedDataParallel"
    assert described.own_groups
    assert described.options["bucket_size"] == "2000"
    assert sum(unit.numel for unit in described.units) == ROOT_NUMEL + 8 * FLOOR_NUMEL
    assert bucketed(DistributedDataParallelConfig()).options == {}
