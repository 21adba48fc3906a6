"""A client as NeMo AutoModel is one: its imports, its checks, its calls and what it reads afterwards, one for one."""

import inspect
import logging
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
from tests.support.on_ranks import first_rank_warns, fixed_seed, on_ranks

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


def test_it_checks_the_signatures_before_it_starts() -> None:
    for function in (fully_shard, fully_shard_model):
        parameters = inspect.signature(function).parameters
        assert "mixed_precision_policy" in parameters
        assert "report_nan_in_param_grad" in parameters
        assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())


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


@pytest.mark.parametrize(
    ("strategy", "with_optimizer"),
    [(0, True), (1, False), (3, True)],
    ids=["0-both_at_once", "1-optimizer_later", "3-both_at_once"],
)
@on_ranks(2)
def test_it_trains_as_one_process(strategy: int, with_optimizer: bool) -> None:
    logging.getLogger("megatron_fsdp").setLevel(logging.WARNING)
    model, optimizer = _prepare(strategy, with_optimizer)
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    result: dict[str, Any] = {
        "is wrapper": isinstance(model, MegatronFSDP),
        "names": names,
        "proxies": hasattr(model, "_no_split_modules"),
    }
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, tokens(step).chunk(dist.get_world_size())[dist.get_rank()]).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        result["grads"] = (len(grads), all(isinstance(grad, DTensor) for grad in grads))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    full, expected = model.full_parameters(), reference(3)
    result["missing"] = sorted(expected.keys() ^ full.keys())
    result["difference"] = max((full[name] - expected[name]).abs().max().item() for name in expected)
    assert result.pop("difference") <= TOLERANCE
    assert result == {
        "is wrapper": True,
        "names": [
            "embed_tokens.weight",
            "layers.0.up.weight",
            "layers.0.down.weight",
            "layers.1.up.weight",
            "layers.1.down.weight",
            "lm_head.weight",
            "unused.weight",
            "unused.bias",
        ],
        "proxies": True,
        "grads": (5, True),
        "missing": [],
    }


@on_ranks(2)
def test_the_keywords_of_its_older_version_are_accepted() -> None:
    given = arguments(3)
    del given["mixed_precision_policy"], given["report_nan_in_param_grad"]
    given.update(grad_reduce_in_fp32=False, preserve_fp32_weights=False, check_for_nan_in_grad=True)
    with first_rank_warns("is deprecated", FutureWarning) as caught:
        model = fully_shard_model(module=build(), **given)
    assert len(caught) == (dist.get_rank() == 0)
    assert (model.report_nan_in_param_grad, model.mp_policy.main_params_dtype) == (True, None)
