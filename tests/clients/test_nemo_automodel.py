"""A client as NeMo AutoModel is one: its imports, its checks, its calls and what it reads afterwards, one for one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import megatron_fsdp
from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from megatron_fsdp.fully_shard import fully_shard_optimizer
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, on_ranks

TOLERANCE = 2e-6


@dataclass
class Output(Mapping[str, Tensor]):
    """What models of that library return: a mapping with attributes."""

    logits: Tensor

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)

    def __iter__(self) -> Any:
        return iter(("logits",))

    def __len__(self) -> int:
        return 1


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.down(F.silu(self.up(hidden_states)))


class CausalModel(nn.Module):
    """Called with keywords only; the output embedding is tied; names its layers as Hugging Face models do."""

    _no_split_modules = ("DecoderLayer",)

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([DecoderLayer(), DecoderLayer()])
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.unused = nn.Linear(2, 2)  # the last module takes no part in forward

    def forward(self, *, input_ids: Tensor) -> Output:
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states=hidden_states)
        return Output(logits=self.lm_head(hidden_states))


def build() -> CausalModel:
    with fixed_seed(0):
        return CausalModel()


def tokens(step: int) -> Tensor:
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def reference(steps: int) -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, tokens(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def arguments(strategy: int) -> dict[str, Any]:
    """All keywords of the call, device not among them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    mesh[("dp", "cp")]._flatten("dp_cp")
    return {
        "fsdp_unit_modules": [DecoderLayer],
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
    model: Any = build()
    if with_optimizer:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = fully_shard(module=model, optimizer=optimizer, **arguments(strategy))
        return model, optimizer
    model = fully_shard_model(module=model, **arguments(strategy))
    model._replace_param_with_distributed_if_needed()
    model._pre_shard_hf_state_dict_keys = ["embed_tokens.weight"]
    kept = {name: dict(param.__dict__) for name, param in model.module.named_parameters(remove_duplicate=False)}
    model.to(torch.device("cpu"), non_blocking=True)
    for name, param in model.module.named_parameters(remove_duplicate=False):
        param.__dict__.update(kept[name])
    for param in model.parameters():
        param._megatron_fsdp_model = model
    model._replace_param_with_distributed_if_needed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, fully_shard_optimizer(optimizer)


@pytest.mark.parametrize(("strategy", "with_optimizer"), [(1, False), (3, True)], ids=["optimizer_later", "both"])
@on_ranks(2)
def test_it_trains_as_one_process(strategy: int, with_optimizer: bool) -> None:
    model, optimizer = _prepare(strategy, with_optimizer)
    assert isinstance(model, MegatronFSDP)
    assert hasattr(model, "_no_split_modules")
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    assert names == [name for name, _ in build().named_parameters(remove_duplicate=False)]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, tokens(step).chunk(dist.get_world_size())[dist.get_rank()]).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert (len(grads), all(isinstance(grad, DTensor) for grad in grads)) == (5, True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_equal_tensors(model.full_parameters(), reference(3), 0.0, TOLERANCE)
