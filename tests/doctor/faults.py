"""Ways to shard, right ones and ones with a planted fault; the doctor has to tell which."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard, fully_shard_optimizer

Pair = tuple[nn.Module, torch.optim.Optimizer]
Optimizer = torch.optim.Optimizer
UP = "blocks.0.up.weight"


# ---- right ways ----------------------------------------------------------------------------------------------------


def sharded(model: nn.Module, optimizer: Optimizer, strategy: int = 3, **options: Any) -> Pair:
    return fully_shard(model, optimizer, zero_dp_strategy=strategy, **options)


def in_buckets(model: nn.Module, _optimizer: Optimizer) -> Pair:
    """This project's DistributedDataParallel."""
    config = DistributedDataParallelConfig(bucket_size=100, overlap_grad_reduce=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(config, model)
    return wrapped, fully_shard_optimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-3))


def by_torch_fsdp(model: nn.Module, _optimizer: Optimizer) -> Pair:
    for block in model.blocks:  # type: ignore[union-attr]
        torch_fully_shard(block)
    torch_fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_torch_ddp(model: nn.Module, optimizer: Optimizer) -> Pair:
    return TorchDDP(model), optimizer


def by_hand(
    model: nn.Module, optimizer: Optimizer, name: str = "", change: Callable[[Tensor], Tensor] | None = None
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


class Around(nn.Module):
    """Something around a model: what is called is `call(module, *args)`."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.module, *args)


# ---- wrong factors -------------------------------------------------------------------------------------------------


def summed(model: nn.Module, optimizer: Optimizer) -> Pair:
    """The sum over ranks, where the loss is a mean."""
    return sharded(model, optimizer, calculate_per_token_loss=True)


# ---- wrong values of one gradient ----------------------------------------------------------------------------------


def negate(grad: Tensor) -> Tensor:
    return -grad


def spoil(grad: Tensor) -> Tensor:
    return torch.full_like(grad, torch.nan)


# ---- reductions that are missed ------------------------------------------------------------------------------------


def never_reduced(model: nn.Module, optimizer: Optimizer) -> Pair:
    """Nobody exchanges anything."""
    return model, optimizer


def each_shard_its_own(model: nn.Module, optimizer: Optimizer) -> Pair:
    """Every rank keeps its shard of its own gradient instead of the sum of all."""
    model, optimizer = sharded(model, optimizer)
    for group in model.parameter_groups():  # type: ignore[operator]
        for axis in group.plan.axes:
            object.__setattr__(axis, "exchange", _keep_own)
    return model, optimizer


def _keep_own(received: Tensor, full: Tensor, _async_op: bool = True) -> None:
    """The pairwise half of a reduce-scatter on gloo, without the others' rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    received.zero_()
    if received.numel() == full.numel():  # else only the others' are received
        received.view(ranks, -1)[rank] = full.view(ranks, -1)[rank]


def one_rank_left_out(model: nn.Module, optimizer: Optimizer) -> Pair:
    """The last rank adds zeros."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for param in model.parameters():
            param.register_hook(torch.zeros_like)
    return by_hand(model, optimizer)


def dropped(model: nn.Module, optimizer: Optimizer) -> Pair:
    """One gradient is lost on the way."""
    model, optimizer = sharded(model, optimizer)

    def lose(param: Tensor) -> None:
        param.grad = None

    _parameter(model).register_post_accumulate_grad_hook(lose)
    return model, optimizer


# ---- steps ---------------------------------------------------------------------------------------------------------


def stale_forward(model: nn.Module, optimizer: Optimizer) -> Pair:
    """Computes with the weights of before the last update."""
    before: list[dict[str, Tensor]] = []

    def forward(module: nn.Module, *args: Any) -> Any:
        params = dict(module.named_parameters())
        before.append({name: param.detach().clone() for name, param in params.items()})
        old = before[-2:][0]
        return functional_call(module, {name: p + (old[name] - p).detach() for name, p in params.items()}, args)

    model, optimizer = by_hand(model, optimizer)
    return Around(model, forward), optimizer


def not_in_the_optimizer(model: nn.Module, _optimizer: Optimizer) -> Pair:
    """One parameter is forgotten when the optimizer is built."""
    trained = [param for name, param in model.named_parameters() if name != UP]
    return sharded(model, torch.optim.AdamW(trained, lr=1e-3))


def frozen_is_trained(model: nn.Module, _optimizer: Optimizer) -> Pair:
    """Sharding forgets which parameters are frozen."""
    model.requires_grad_(True)
    return sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def _parameter(model: nn.Module) -> nn.Parameter:
    return next(param for name, param in model.named_parameters() if name.removeprefix("module.") == UP)


# ---- values of one rank only ---------------------------------------------------------------------------------------


def buffer_of_rank_one(model: nn.Module, optimizer: Optimizer, buffer: str) -> Pair:
    """After each call a buffer of rank 1 is changed."""

    def forward(module: nn.Module, *args: Any) -> Any:
        out = module(*args)
        if dist.get_rank() == 1:
            module.get_buffer(buffer).data.add_(5)  # backward may not see it
        return out

    model, optimizer = by_hand(model, optimizer)
    return Around(model, forward), optimizer


def norm_of_rank_one(model: nn.Module, optimizer: Optimizer) -> Pair:
    """Rank 1 clips by twice the norm, but to no effect, since the limit is never reached."""
    model, optimizer = sharded(model, optimizer)
    right = model.clip_grad_norm_
    object.__setattr__(model, "clip_grad_norm_", lambda limit: right(limit) * (1 + dist.get_rank()))
    return model, optimizer


def seeded_by_rank(model: nn.Module, optimizer: Optimizer, shard: Callable[..., Pair], right: int) -> Pair:
    """Each rank draws weights of its own; those of one rank are right."""
    if dist.get_rank() != right:
        for param in model.parameters():
            nn.init.normal_(param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fully_shard gives all those of rank 0, and says so
        return shard(model, optimizer)


def only_the_model(model: nn.Module, optimizer: Optimizer) -> Any:
    return sharded(model, optimizer)[0]
