"""`megatron_fsdp_version=2`: a wrapper whose units are sharded one by one, against version 1 on the same units."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP
from megatron_fsdp.errors import NotSupportedYetError
from megatron_fsdp.fully_shard import fully_shard_optimizer
from tests.support.doors import Noted, assert_same, build, train
from tests.support.on_ranks import assert_equal_tensors, engine_of, fixed_seed, on_ranks, refusal
from tests.support.zoo import FLOORS, Block, Floor, TinyTransformer, Tower, tower_case


def wrapped(version: int, **fields: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, megatron_fsdp_version=version, **{"overlap_grad_reduce": True, **fields}
    )
    return DistributedDataParallel(config, build(Tower), fsdp_unit_modules=[Floor])


def trained(model: MegatronFSDP) -> Noted:
    """What three steps of two microbatches give, the first of them without a sync."""
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    options: Any = {"steps": 3, "case": tower_case(), "clip": lambda model: model.clip_grad_norm_(0.01)}
    return train(model, optimizer, lambda _, is_last: None if is_last else model.no_sync(), **options)


STRATEGIES: dict[str, dict[str, Any]] = {
    "0": {"data_parallel_sharding_strategy": "no_shard"},
    "1": {"data_parallel_sharding_strategy": "optim"},
    "2": {"data_parallel_sharding_strategy": "optim_grads"},
    "3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "hsdp": {"data_parallel_sharding_strategy": "optim_grads_params", "num_distributed_optimizer_instances": 2},
    "hfsdp": {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "num_distributed_optimizer_instances": 2,
        "outer_dp_sharding_strategy": "optim",
    },
    "bf16": {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "megatron_fsdp_main_grads_dtype": torch.float32,
        "megatron_fsdp_grad_comm_dtype": torch.bfloat16,
    },
}


@pytest.mark.unmerged
@pytest.mark.full(short=["hfsdp", "bf16"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(4)
def test_versions_give_the_same_bits(name: str) -> None:
    first, second = (wrapped(version, **STRATEGIES[name]) for version in (1, 2))
    assert engine_of(second).unit_plan.source == "one call per unit"
    labels = [[unit.label for unit in engine_of(model).units] for model in (first, second)]
    assert labels[0] == labels[1] == ["(root)", *(f"floors.{floor}" for floor in range(FLOORS))]
    ours, theirs = trained(second), trained(first)
    assert len(ours) == 3 * (2 + 2 * FLOORS + 3) + 2 * FLOORS + 2
    assert_same(ours, theirs, rtol=0, atol=0)
    assert list(first.state_dict()) == list(second.state_dict())


@on_ranks(2)
def test_the_wrapper_takes_it_of_a_configuration_and_matches_ranks() -> None:
    config = DistributedDataParallelConfig(
        megatron_fsdp_version=2, data_parallel_sharding_strategy="optim_grads_params", overlap_grad_reduce=True
    )
    index = FSDPDistributedIndex(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "dp")
    with fixed_seed(dist.get_rank()):
        module = Tower()
    with pytest.warns(UserWarning, match="differed between ranks") if dist.get_rank() == 0 else fixed_seed(0):
        model = MegatronFSDP(module, index, config, fsdp_unit_modules=[Floor], sync_model_each_microbatch=True)
    assert_equal_tensors(model.full_parameters(), dict(build(Tower).named_parameters()))
    assert [unit.label for unit in engine_of(model).units][:2] == ["(root)", "floors.0"]


REFUSED: dict[str, dict[str, Any]] = {
    "delay_wgrad_compute": {"delay_wgrad_compute": True},
    "param_name_patterns": {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
    "fine_grained": {"megatron_fsdp_enable_fine_grained_param_gather": True},
    "suggested_communication_unit_size": {"suggested_communication_unit_size": 9},
    "a weight format": {"fp8_param_gather": True},
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_it_cannot_do_is_refused(name: str) -> None:
    fields = {"data_parallel_sharding_strategy": "optim_grads_params", **REFUSED[name]}
    said = refusal(wrapped, 2, error=NotSupportedYetError, **fields)
    assert name in said
    assert "cannot be used with megatron_fsdp_version=2" in said


@on_ranks(2)
def test_a_parameter_tied_across_units_is_refused_and_nothing_is_changed() -> None:
    module = nn.Sequential(Tower(), Tower())
    module[1].floors[0].up.weight = module[0].floors[0].up.weight  # type: ignore[index, union-attr]
    config = wrapped(2, **STRATEGIES["3"]).ddp_config
    before = list(module.parameters())
    said = refusal(DistributedDataParallel, config, module, fsdp_unit_modules=[Floor])
    assert "1.floors.0.up.weight, tied to 0.floors.0.up.weight, cannot be used with megatron_fsdp_version=2" in said
    assert all(map(lambda held, was: held is was, module.parameters(), before))
    tied = TinyTransformer(layers=2, tied=True)  # at the root
    DistributedDataParallel(config, tied, fsdp_unit_modules=[Block])
