"""Every field of the configuration of `DistributedDataParallel` is told, with its effect on buckets."""

from typing import Any

import pytest
import torch

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.describe.description import Description
from megatron_fsdp.plan.simulate import simulated_ranks
from tests.support.zoo import FLOOR_NUMEL, ROOT_NUMEL, TOWER_FEATURES, Floor, Tower, tower_loss


def bucketed(config: DistributedDataParallelConfig, steps: int = 0, **arguments: Any) -> Description:
    with simulated_ranks(4, rank=2) as mesh:
        model = DistributedDataParallel(config, Tower(), mesh, **arguments)
        for _ in range(steps):
            tower_loss(model, torch.zeros(2, TOWER_FEATURES)).backward()
        return model.describe()


SHARDS = {"use_distributed_optimizer": True}
CHANGED: dict[str, Any] = {
    **dict.fromkeys(["use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"], True),
    **dict.fromkeys(["pad_buckets_for_high_nccl_busbw", "check_for_large_grads", "check_for_nan_in_grad"], True),
    **dict.fromkeys(["grad_reduce_in_fp32", "delay_wgrad_compute", "use_megatron_fsdp"], True),
    "bucket_size": 2000,
    "num_buckets": 3,
    "gradient_reduce_div_fusion": False,
    "num_distributed_optimizer_instances": 2,
    "param_name_patterns_for_fp32_local_accumulation": ("all",),
    "data_parallel_sharding_strategy": "optim",
}
NEEDS: dict[str, dict[str, Any]] = {
    "overlap_param_gather": {**SHARDS, "overlap_grad_reduce": True},
    "pad_buckets_for_high_nccl_busbw": SHARDS,
    "num_distributed_optimizer_instances": SHARDS,
    "delay_wgrad_compute": {"overlap_grad_reduce": True},
    "use_megatron_fsdp": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "data_parallel_sharding_strategy": {"use_megatron_fsdp": True},
}


@pytest.mark.full(short=["bucket_size", "use_distributed_optimizer", "use_megatron_fsdp"])
@pytest.mark.parametrize("name", CHANGED)
def test_changed_fields_of_the_configuration_are_told(name: str) -> None:
    fields = {name: CHANGED[name], **NEEDS.get(name, {})}
    arguments = {"fsdp_unit_modules": [Floor]} if "use_megatron_fsdp" in fields else {}
    assert name in bucketed(DistributedDataParallelConfig(**fields), **arguments).options


def test_a_bucketed_model_is_described_without_fields_at_their_defaults() -> None:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=2000)
    described = bucketed(config, steps=1)
    assert described.wrapper == "DistributedDataParallel"
    assert described.own_groups
    assert described.options["bucket_size"] == "2000"
    assert sum(unit.numel for unit in described.units) == ROOT_NUMEL + 8 * FLOOR_NUMEL
    assert bucketed(DistributedDataParallelConfig()).options == {}
