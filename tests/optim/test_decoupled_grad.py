"""`use_decoupled_grad`: gradients in an attribute of their own, in the dtype they were accumulated in."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.support import api_net
from tests.support.api_net import build, gradients, largest_difference, mesh, run_batch, summed_gradients, weights
from tests.support.on_ranks import on_ranks, refusal

BF16_GRADS = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.bfloat16)
LR = 0.1


class DecoupledSGD(torch.optim.Optimizer):
    """Plain SGD that reads `.decoupled_grad`, and `.grad` where there is none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                grad = param.grad if grad is None else grad
                if grad is not None:
                    param.add_(grad.to(param.dtype), alpha=-group["lr"])


wrap = partial(api_net.wrap, use_decoupled_grad=True)


@pytest.mark.parametrize(("strategy", "auto_sync"), [(0, False), (1, True), (2, False), (3, True)])
@on_ranks(2)
def test_gradients_are_decoupled_in_their_own_dtype_and_grad_stays_none(strategy: int, auto_sync: bool) -> None:
    model = wrap(strategy, mixed_precision_policy=BF16_GRADS, sync_model_each_microbatch=auto_sync)
    run_batch(model, 0)
    if not auto_sync:
        model.finish_grad_sync()
    for param in model.parameters():
        grad = param.decoupled_grad  # type: ignore[attr-defined]
        assert param.grad is None
        assert (grad.dtype, grad.placements, grad.shape) == (torch.bfloat16, param.placements, param.shape)  # type: ignore[attr-defined]
    # of bfloat16's 8 bits, and not of a float32 that was cast on the way
    assert 0.0 < largest_difference(gradients(model), summed_gradients(0)) <= 2e-2


@pytest.mark.parametrize(("strategy", "auto_sync"), [(0, True), (1, False), (3, False)])
@on_ranks(3)
def test_microbatches_clipping_and_scaling_act_on_decoupled_gradients(strategy: int, auto_sync: bool) -> None:
    """Three updates of two microbatches each, the sum of which is clipped and scaled by the model."""
    model = wrap(strategy, sync_model_each_microbatch=auto_sync)
    optimizer = fully_shard_optimizer(DecoupledSGD(model.parameters()))
    reference = build()
    reference_optimizer = DecoupledSGD(reference.parameters())
    worst = 0.0
    for step in range(3):
        for number in (2 * step, 2 * step + 1):
            run_batch(model, number)
            run_batch(reference, number)
        model.finish_grad_sync()
        norm = model.clip_grad_norm_(0.05)
        worst = max(worst, abs(norm.item() - torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05).item()))
        model.scale_gradients(3.0)
        for param in reference.parameters():
            if param.grad is not None:
                param.grad.mul_(3.0)
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    difference = largest_difference(weights(model), weights(reference))
    assert worst <= 1e-6
    assert difference <= 2e-6


CLEARS: list[Callable[[MegatronFSDP, torch.optim.Optimizer], object]] = [
    lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, _: model.zero_grad(),
    lambda model, _: model.zero_grad_buffer(),
    lambda model, _: [setattr(param, "decoupled_grad", None) for param in model.parameters()],
]


@on_ranks(2)
def test_every_way_to_clear_clears_decoupled_gradients() -> None:
    for strategy, clear in enumerate(CLEARS):
        model = wrap(strategy)
        optimizer = fully_shard_optimizer(DecoupledSGD(model.parameters()))
        run_batch(model, 5)
        clear(model, optimizer)
        assert [grad.abs().max().item() for grad in gradients(model).values()] == ([0.0] * 7 if strategy == 0 else [])
        for number in range(2):
            run_batch(model, number)
        assert largest_difference(gradients(model), summed_gradients(0, 1)) <= 1e-6, strategy


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_what_is_in_grad_all_the_same_is_added(strategy: int) -> None:
    """A gradient that got into `.grad` of the sharded parameters, as that of a penalty on them does."""
    model = wrap(strategy)
    run_batch(model, 0)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model.finish_grad_sync()
    assert all(param.grad is None for param in model.parameters())
    assert (
        largest_difference(gradients(model), {name: grad + 1.0 for name, grad in summed_gradients(0).items()}) <= 1e-6
    )


@on_ranks(2)
def test_an_optimizer_of_torch_would_find_nothing_and_is_refused() -> None:
    model = build()
    told = refusal(fully_shard, model, torch.optim.AdamW(model.parameters()), mesh(), use_decoupled_grad=True)
    assert "in param.decoupled_grad, where AdamW, one of torch's own, does not look" in told
    assert "where SGD" in refusal(fully_shard_optimizer, torch.optim.SGD(wrap(3).parameters(), lr=0.1))
