"""A model that any door has sharded, trained in the body of a test and compared with one process on the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, experimental
from tests.support.arrangements import mesh_of
from tests.support.case import SAMPLES, momentum
from tests.support.on_ranks import fixed_seed
from tests.support.zoo import ModelCase, TinyTransformer, token_case

Noted = list[Tensor | None]
Before = Callable[[Any, bool], object]
"""What is done to a sharded model before a microbatch, the last of its step or not; or a block around it."""

TOKENS = token_case(TinyTransformer)


def build(make: Callable[..., Any] = TinyTransformer, seed: int = 0, **options: Any) -> Any:
    with fixed_seed(seed):
        return make(**options)


def in_buckets(model: nn.Module, fields: Mapping[str, Any], **options: Any) -> DistributedDataParallel:
    """Wrap a model by `DistributedDataParallel`, with these fields of its configuration."""
    return DistributedDataParallel(DistributedDataParallelConfig(**fields), model, **options)


def one_by_one(by: Callable[..., Any], *modules: nn.Module, **options: Any) -> Any:
    """Shard modules by one call each, inner ones first; return the last."""
    for module in modules:
        by(module, **options)
    return modules[-1]


def in_place(*modules: nn.Module) -> Any:
    """Shard modules one by one by the per-module API: weights, gradients and optimizer state, over all ranks."""
    cut = [Shard(0)]
    with experimental.fully_shard_context("cpu"):
        placements = experimental.Placements([0], cut, cut, cut)
        return one_by_one(experimental.fully_shard, *modules, mesh=ring(), placements=placements)


def ring() -> DeviceMesh:
    """Make a mesh of all ranks in one dimension."""
    return mesh_of((dist.get_world_size(),), ("shard",))


def hybrid() -> DeviceMesh:
    """Make a mesh of two replicas, each sharded over half of the ranks."""
    return mesh_of((2, dist.get_world_size() // 2), ("replicate", "shard"))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def wholes(tensors: Any) -> Noted:
    return [None if each is None else whole(each) for each in tensors]


def backward(model: Any, index: int = 7, case: ModelCase = TOKENS, data_ranks: int = 0, factor: float = 1.0) -> Tensor:
    """Run forward and backward of a batch, of this rank's part if sharded; return the mean loss of the ranks."""
    batch = case.make_batch(SAMPLES, torch.Generator().manual_seed(index))
    is_sharded, ranks = any(isinstance(param, DTensor) for param in model.parameters()), dist.get_world_size()
    data_ranks = data_ranks or ranks
    mine = batch.part(dist.get_rank() // (ranks // data_ranks), data_ranks) if is_sharded else batch
    loss = case.loss(model, mine) * factor
    loss.backward()
    total = loss.detach().clone()
    if is_sharded:
        dist.all_reduce(total)
        total /= ranks
    return total


def clip_by_torch(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    before: Before | None = None,
    *,
    alone: bool = False,
    steps: int = 2,
    microbatches: int = 2,
    case: ModelCase = TOKENS,
    data_ranks: int = 0,
    clip: Callable[[Any], Tensor] | None = clip_by_torch,
) -> Noted:
    """Train by SGD with momentum, or the optimizer given; return losses, gradients, norms, and at the end weights."""
    optimizer, noted = momentum(model) if optimizer is None else optimizer, Noted()
    for step in range(steps):
        for number in range(microbatches):
            around = before(model, number == microbatches - 1) if before is not None and not alone else None
            with around if isinstance(around, AbstractContextManager) else nullcontext():
                noted.append(backward(model, microbatches * step + number, case, data_ranks, 1 / microbatches))
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        held = [*stepped, *(param.grad for param in stepped if param.grad is not None)]
        # Else a model that nothing has sharded would be compared with itself.
        assert {isinstance(each, DTensor) for each in held} == {not alone}
        noted += wholes(param.grad for param in model.parameters())
        if clip is not None:
            noted.append(whole(clip(model)))
        optimizer.step()
        optimizer.zero_grad()
    return noted + wholes(model.parameters())


def step(model: Any, optimizer: torch.optim.Optimizer, index: int, case: ModelCase = TOKENS) -> None:
    """Train one step of one batch."""
    backward(model, index, case)
    optimizer.step()
    optimizer.zero_grad()


def assert_same(
    found: Sequence[Tensor | None],
    wanted: Sequence[Tensor | None],
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=partial("{}: {}".format, number))


def assert_like_one_process(
    model: Any,
    plain: nn.Module,
    before: Before | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> None:
    """Train both, and assert equal losses, gradients, norms and weights; `optimizer` steps the sharded model."""
    assert_same(train(model, optimizer, before, **options), train(plain, alone=True, **options))
