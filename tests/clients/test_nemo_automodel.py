"""A client as NeMo AutoModel is one: its imports, its checks, its calls and what it reads afterwards, one for one."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from megatron_fsdp.fully_shard import fully_shard_optimizer
from tests.support.case import adamw_above_noise as adamw
from tests.support.doors import assert_same, build, train
from tests.support.on_ranks import on_ranks
from tests.support.zoo import Block


def make() -> Any:
    """With a tied output embedding, and a module that takes no part in forward."""
    model = build(layers=2, tied=True)
    model.unused = build(partial(nn.Linear, 2, 2))
    return model


def arguments(strategy: int) -> dict[str, Any]:
    """All keywords of the call, device not among them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    mesh[("dp", "cp")]._flatten("dp_cp")
    return {
        "fsdp_unit_modules": [Block],
        "device_mesh": mesh,
        "dp_shard_dim": "dp_cp",
        "tp_dim": "tp",
        "zero_dp_strategy": strategy,
        "init_model_with_meta_device": False,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "average_in_collective": False,
        "disable_bucketing": False,
        "calculate_per_token_loss": False,
        "keep_fp8_transpose_cache": False,
        "nccl_ub": False,
        "fsdp_double_buffer": False,
        "mixed_precision_policy": megatron_fsdp.MixedPrecisionPolicy(
            main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=None
        ),
        "report_nan_in_param_grad": False,
    }


def _prepare(strategy: int, with_optimizer: bool) -> tuple[Any, torch.optim.Optimizer]:
    """Shard, then the client's own bookkeeping on parameters, then the optimizer."""
    model = make()
    if with_optimizer:
        optimizer: torch.optim.Optimizer = adamw(model)
        model, optimizer = fully_shard(module=model, optimizer=optimizer, **arguments(strategy))
        return model, optimizer
    model = fully_shard_model(module=model, **arguments(strategy))
    model._replace_param_with_distributed_if_needed()
    model._pre_shard_hf_state_dict_keys = ["tokens.weight"]
    kept = {name: dict(param.__dict__) for name, param in model.module.named_parameters(remove_duplicate=False)}
    model.to(torch.device("cpu"), non_blocking=True)
    for name, param in model.module.named_parameters(remove_duplicate=False):
        param.__dict__.update(kept[name])
    for param in model.parameters():
        param._megatron_fsdp_model = model
    model._replace_param_with_distributed_if_needed()
    optimizer = adamw(model)
    return model, fully_shard_optimizer(optimizer)


@pytest.mark.parametrize(("strategy", "with_optimizer"), [(1, False), (3, True)], ids=["optimizer_later", "both"])
@on_ranks(2)
def test_it_trains_as_one_process(strategy: int, with_optimizer: bool) -> None:
    model, optimizer = _prepare(strategy, with_optimizer)
    assert isinstance(model, MegatronFSDP)
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    assert names == [name for name, _ in make().named_parameters(remove_duplicate=False)]
    plain = make()
    found, wanted = train(model, optimizer, steps=3), train(plain, adamw(plain), alone=True, steps=3)
    assert_same(found, wanted)
    weights = slice(-len(list(plain.parameters())), None)
    assert_same(found[weights], wanted[weights], rtol=0, atol=2e-6)
