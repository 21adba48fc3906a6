"""Every field of the configuration of `DistributedDataParallel` is told, with its effect on buckets."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.describe.description import Description
from megatron_fsdp.plan.simulate import simulated_ranks
from tests.support.tower import FEATURES, FLOOR_NUMEL, ROOT_NUMEL, Floor, Tower, tower_loss


def bucketed(config: DistributedDataParallelConfig, steps: int = 0, **arguments: Any) -> Description:
    with simulated_ranks(4, rank=2) as mesh:
        model = DistributedDataParallel(config, Tower(), mesh, **arguments)
        for _ in range(steps):
            tower_loss(model, torch.zeros(2, FEATURES)).backward()
        return model.describe()


_DDP: dict[str, tuple[dict[str, Any], str]] = {
    "use_distributed_optimizer": ({"use_distributed_optimizer": True}, "optimizer state is sharded"),
    "overlap_grad_reduce": ({"overlap_grad_reduce": True}, "gradients are reduced during backward"),
    "overlap_param_gather": (
        {"overlap_param_gather": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
        "ahead of their use",
    ),
    "bucket_size": ({"bucket_size": 2000}, "buckets close at 2,000 elements"),
    "num_buckets": ({"num_buckets": 3}, "buckets close at 2,902 elements"),
    "pad_buckets_for_high_nccl_busbw": (
        {"pad_buckets_for_high_nccl_busbw": True, "use_distributed_optimizer": True},
        "multiples of 65,536",
    ),
    "check_for_large_grads": ({"check_for_large_grads": True}, "large gradients are looked for"),
    "check_for_nan_in_grad": ({"check_for_nan_in_grad": True}, "every gradient is checked"),
    "gradient_reduce_div_fusion": ({"gradient_reduce_div_fusion": False}, "divided before they travel"),
    "grad_reduce_in_fp32": ({"grad_reduce_in_fp32": True}, "in float32"),
    "num_distributed_optimizer_instances": (
        {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
        "2 groups of ranks with a whole optimizer each",
    ),
    "gradient_accumulation_fusion": ({"gradient_accumulation_fusion": True}, "linears write weight gradients straight"),
    "delay_wgrad_compute": ({"delay_wgrad_compute": True, "overlap_grad_reduce": True}, "at the end of backward"),
    "param_name_patterns_for_fp32_local_accumulation": (
        {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
        "accumulate in float32",
    ),
    "use_megatron_fsdp": (
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
        "8 units",
    ),
    "data_parallel_sharding_strategy": (
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"},
        "optimizer state is sharded over 4 ranks",
    ),
}


@pytest.mark.parametrize("name", _DDP)
def test_changed_fields_of_the_configuration_are_told(name: str) -> None:
    fields, effect = _DDP[name]
    arguments = {"fsdp_unit_modules": [Floor]} if "use_megatron_fsdp" in fields else {}
    option = bucketed(DistributedDataParallelConfig(**fields), **arguments).option(name)
    assert not option.is_default
    assert effect in option.effect
    assert option.has_effect


def test_every_field_of_the_configuration_is_told() -> None:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=2000)
    described = bucketed(config, steps=1)
    names = [option.name for option in described.options]
    fields = [field.name for field in dataclasses.fields(config)]
    assert set(fields) <= set(names)
    assert len(names) == len(set(names))
    assert described.wrapper == "DistributedDataParallel"
    assert described.own_groups
    assert described.option("fsdp_double_buffer").effect == "concerns units, and these are buckets"
    assert described.option("dp_dim").value == "dp"
    assert sum(unit.numel for unit in described.units) == ROOT_NUMEL + 8 * FLOOR_NUMEL
