"""Ways to shard, right ones and ones with a planted fault; the doctor has to tell which."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import fully_shard

Pair = tuple[nn.Module, torch.optim.Optimizer]
UP = "blocks.0.up.weight"
HEAD = "head.weight"


def own_name(name: str) -> str:
    return name.removeprefix("module.")


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: int = 3, **options: Any) -> Pair:
    return fully_shard(model, optimizer, zero_dp_strategy=strategy, **options)


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str = "", change: Callable[[Tensor], Tensor] | None = None
) -> Pair:
    """Data parallelism with one all-reduce per gradient; `change` is done to the reduced gradient of one parameter."""

    def reduce(param: nn.Parameter, is_changed: bool) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
        if is_changed and change is not None:
            param.grad = change(param.grad).contiguous()

    for own, param in model.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda p, is_changed=own == name: reduce(p, is_changed))
    return model, optimizer


def swap_halves(grad: Tensor) -> Tensor:
    first, second = grad.chunk(2, 1)
    return torch.cat([second, first], 1)


def transpose_halves(grad: Tensor) -> Tensor:
    return torch.cat([half.t().reshape(half.shape) for half in grad.chunk(2, 0)])


def summed_not_averaged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
    return sharded(model, optimizer, calculate_per_token_loss=True)
