"""`megatron_fsdp_version=2`: a wrapper whose units are sharded one by one, against version 1 on the same units."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP
from megatron_fsdp.errors import NotSupportedYetError
from megatron_fsdp.fully_shard import fully_shard_optimizer
from tests.support.on_ranks import engine_of, fixed_seed, on_ranks, refusal
from tests.support.zoo import FLOORS, Block, Floor, TinyTransformer, Tower, tower_loss
from tests.trace.training import data


def wrapped(version: int, **fields: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, megatron_fsdp_version=version, **{"overlap_grad_reduce": True, **fields}
    )
    with fixed_seed(0):
        return DistributedDataParallel(config, Tower(), fsdp_unit_modules=[Floor])


def trained(model: MegatronFSDP, *, max_norm: float = 0.01) -> list[torch.Tensor]:
    """Gradients, norms and weights of three steps of two microbatches, the first without a sync."""
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = []
    for step in range(3):
        with model.no_sync():
            tower_loss(model, data(step)).backward()
        tower_loss(model, data(step + 9)).backward()
        found += [param.grad.full_tensor() for param in model.parameters() if isinstance(param.grad, DTensor)]
        found.append(model.clip_grad_norm_(max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *model.full_parameters().values()]


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


@pytest.mark.full(short=["hfsdp", "bf16"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(4)
def test_versions_give_the_same_bits(name: str) -> None:
    first, second = (wrapped(version, **STRATEGIES[name]) for version in (1, 2))
    assert engine_of(second).unit_plan.source == "one call per unit"
    labels = [[unit.label for unit in engine_of(model).units] for model in (first, second)]
    assert labels[0] == labels[1] == ["(root)", *(f"floors.{floor}" for floor in range(FLOORS))]
    ours, theirs = trained(second), trained(first)
    assert len(ours) == len(theirs) == 3 * (2 * FLOORS + 3) + 2 * FLOORS + 2
    assert all(map(torch.equal, ours, theirs))
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
    with fixed_seed(0):
        first = Tower()
    for name, value in model.full_parameters().items():
        assert torch.equal(value, dict(first.named_parameters())[name])
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
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        megatron_fsdp_version=2,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
    )
    before = list(module.parameters())
    said = refusal(DistributedDataParallel, config, module, fsdp_unit_modules=[Floor])
    assert "1.floors.0.up.weight, tied to 0.floors.0.up.weight, cannot be used with megatron_fsdp_version=2" in said
    assert all(map(lambda held, was: held is was, module.parameters(), before))
    tied = TinyTransformer(layers=2, tied=True)  # at the root
    DistributedDataParallel(config, tied, fsdp_unit_modules=[Block])
