"""Every field of the configuration of `DistributedDataParallel` is told, with its effect on buckets."""

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


_DDP: dict[str, dict[str, Any]] = {
    "use_distributed_optimizer": {"use_distributed_optimizer": True},
    "overlap_grad_reduce": {"overlap_grad_reduce": True},
    "overlap_param_gather": {
        "overlap_param_gather": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "bucket_size": {"bucket_size": 2000},
    "num_buckets": {"num_buckets": 3},
    "pad_buckets_for_high_nccl_busbw": {"pad_buckets_for_high_nccl_busbw": True, "use_distributed_optimizer": True},
    "check_for_large_grads": {"check_for_large_grads": True},
    "check_for_nan_in_grad": {"check_for_nan_in_grad": True},
    "gradient_reduce_div_fusion": {"gradient_reduce_div_fusion": False},
    "grad_reduce_in_fp32": {"grad_reduce_in_fp32": True},
    "num_distributed_optimizer_instances": {
        "num_distributed_optimizer_instances": 2,
        "use_distributed_optimizer": True,
    },
    "delay_wgrad_compute": {"delay_wgrad_compute": True, "overlap_grad_reduce": True},
    "param_name_patterns_for_fp32_local_accumulation": {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
    "use_megatron_fsdp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    "data_parallel_sharding_strategy": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"},
}


@pytest.mark.full(short=["bucket_size", "use_distributed_optimizer", "use_megatron_fsdp"])
@pytest.mark.parametrize("name", _DDP)
def test_changed_fields_of_the_configuration_are_told(name: str) -> None:
    fields = _DDP[name]
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
