"""`use_decoupled_grad`: gradients in an attribute of their own, in the dtype they were accumulated in."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.conftest import RunRanks
from tests.support import api_net
from tests.support.api_net import build, gradients, largest_difference, mesh, run_batch, summed_gradients
from tests.support.case import Run, Scenario, Setting, Tolerance, check_strategies
from tests.support.on_ranks import on_ranks, refusal
from tests.support.zoo import MODEL_CASES

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


def clip_and_scale(run: Run) -> None:
    """Three updates of two microbatches each, the sum of which is clipped and scaled by the model."""
    for step in range(3):
        run.backward(2 * step, 2 * step + 1)
        if run.sharded is not None:
            run.sharded.finish_grad_sync()
            norm = run.sharded.clip_grad_norm_(0.05)
        else:
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        run.note("norm", {"norm": norm})
        run.scale(3.0)
        run.note_gradients()
        run.optimizer.step()
        run.note_parameters()
        run.optimizer.zero_grad()


def decoupled_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return DecoupledSGD(model.parameters())


def test_microbatches_clipping_and_scaling_act_on_decoupled_gradients(run_ranks: RunRanks) -> None:
    scenario = Scenario(clip_and_scale, MODEL_CASES["odd_shapes"], decoupled_sgd)
    options = (("use_decoupled_grad", True),)
    settings = [Setting(inner, one_call=False, auto_sync=inner == 0, options=options) for inner in (0, 1, 3)]
    check_strategies(run_ranks, 3, scenario, settings, Tolerance(rtol=2e-6, atol=1e-6))


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
