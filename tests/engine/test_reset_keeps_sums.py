"""What was deferred before a failed batch is still there after `reset`, whichever mode defers it."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.conftest import RunRanks
from tests.support.api_net import Layer, build


class _FailedError(Exception):
    """What a model may raise at any time."""


def _deferring(model: MegatronFSDP, mode: str, last: bool) -> AbstractContextManager[None]:
    if mode == "no_sync":
        return nullcontext() if last else model.no_sync()
    model.set_model_auto_sync(last)
    return nullcontext()


def _batch(number: int) -> torch.Tensor:
    """The part of this rank, (2, 5)."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number)).chunk(2)[dist.get_rank()]


def _fail(module: nn.Module, where: str) -> None:
    """Raise in the second layer's forward, or (on rank 1 only at a later point) in its backward."""

    def stop(*_unused: object) -> None:
        raise _FailedError

    if where == "forward":
        handle = module.get_submodule("layers.1").register_forward_pre_hook(stop)
    else:
        handle = module.get_submodule(f"layers.{dist.get_rank()}").register_full_backward_pre_hook(stop)
    try:
        with pytest.raises(_FailedError):
            module(_batch(1)).square().mean().backward()
    finally:
        handle.remove()


def _gradients(strategy: int, mode: str, where: str) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    model = fully_shard_model(build(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    plain = build()
    with _deferring(model, mode, last=False):
        model(_batch(0)).square().mean().backward()
        _fail(model.module, where)
    model.reset()
    with _deferring(model, mode, last=True):
        model(_batch(2)).square().mean().backward()
    for number in (0, 2):
        for part in torch.randn(4, 5, generator=torch.Generator().manual_seed(number)).chunk(2):
            (plain(part).square().mean() / 2).backward()
    return model.full_gradients(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["no_sync", "auto"])
def test_sums_of_earlier_microbatches_survive_a_failed_forward(run_ranks: RunRanks, strategy: int, mode: str) -> None:
    for found, expected in run_ranks(2, _gradients, strategy, mode, "forward"):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)


@pytest.mark.parametrize("strategy", [0, 3])
def test_ranks_that_failed_at_different_points_reduce_alike_afterwards(run_ranks: RunRanks, strategy: int) -> None:
    """The failed microbatch may have left a part of its gradients, as on one process; nobody hangs."""
    (first, _), (second, _) = run_ranks(2, _gradients, strategy, "no_sync", "backward")
    for name, grad in first.items():
        assert grad is not None
        assert torch.equal(grad, second[name])
