"""The hooks around `optimizer.step` and `zero_grad`: keywords, closures, schedulers, and being connected once."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp import MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError
from tests.support.api_net import (
    backward,
    batches,
    build,
    gradients,
    largest_difference,
    run_batch,
    summed_gradients,
    train,
    wrap,
)
from tests.support.api_net import weights as whole_weights
from tests.support.on_ranks import of_ranks, on_ranks

TOLERANCE = 2e-6


def connected_sgd(model: MegatronFSDP, lr: float = 0.1) -> Any:
    """An SGD whose `step` and `zero_grad` take the further keywords, which the class does not declare."""
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=lr))


# ---- keywords --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_step_syncs_gradients_unless_told_not_to(strategy: int) -> None:
    model = wrap(strategy, sync_model_each_microbatch=False)
    optimizer = connected_sgd(model)
    before = whole_weights(model)
    run_batch(model, 0)
    optimizer.step(sync_grad_before_optimizer_step=False)
    assert largest_difference(whole_weights(model), before) == 0
    optimizer.step()
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 1)
    assert largest_difference(whole_weights(model), whole_weights(reference)) <= TOLERANCE


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_step_installs_weights_unless_told_not_to(strategy: int) -> None:
    model = wrap(strategy, build().bfloat16())
    optimizer = connected_sgd(model, lr=1.0)

    def installed() -> bool:
        model.all_gather_and_wait_parameters_ready(model.parameters())
        main = whole_weights(model)
        raw = {name: param.detach().float() for name, param in model.raw_param.items()}
        return largest_difference(raw, {name: value.bfloat16().float() for name, value in main.items()}) == 0.0

    run_batch(model, 0)
    optimizer.step(install_optimized_model_weights=False)
    assert not installed()
    model.install_optimized_model_weights()
    assert installed()
    run_batch(model, 0)
    optimizer.step()
    assert installed()


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_zero_grad_forgets_pending_gradients_unless_told_not_to(strategy: int) -> None:
    for keyword, wanted in ((True, summed_gradients(1)), (False, summed_gradients(0, 1))):
        model = wrap(strategy, sync_model_each_microbatch=False)
        optimizer = connected_sgd(model)
        run_batch(model, 0)
        optimizer.zero_grad(zero_grad_buffer=keyword)
        run_batch(model, 1)
        model.finish_grad_sync()
        assert largest_difference(gradients(model), wanted) <= TOLERANCE


# ---- closures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "by_keyword", "auto_sync"), [(0, True, False), (2, False, False), (3, True, True)]
)
@on_ranks(2)
def test_step_runs_a_closure_and_returns_its_loss(strategy: int, by_keyword: bool, auto_sync: bool) -> None:
    model, reference = wrap(strategy, sync_model_each_microbatch=auto_sync), build()
    optimizer, expected = connected_sgd(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in batches(3):

        def closure(batch: tuple[Tensor, Tensor] = batch) -> float:
            optimizer.zero_grad()
            return backward(model, batch)

        losses = of_ranks(optimizer.step(closure=closure) if by_keyword else optimizer.step(closure))
        expected.zero_grad()
        assert sum(losses) / 2 == pytest.approx(backward(reference, batch), rel=1e-5)
        expected.step()
    assert largest_difference(whole_weights(model), whole_weights(reference)) <= TOLERANCE


class TwoPhase(torch.optim.Optimizer):
    """Sharpness-aware descent: climbs, calls the closure again there, goes back, and descends by that gradient."""

    def __init__(self, params: Any, lr: float = 0.1, climb: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "climb": climb})

    @torch.no_grad()
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        (group,) = self.param_groups
        params = group["params"]
        with torch.enable_grad():
            loss = closure()
        climbs = [param.grad.clone() * group["climb"] for param in params]
        torch._foreach_add_(params, climbs)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, climbs)
        torch._foreach_add_(params, [param.grad for param in params], alpha=-group["lr"])
        return loss


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_a_closure_sees_weights_that_moved_inside_the_step(strategy: int) -> None:
    """`_foreach_` operations leave no mark on sharded parameters, so only the hooks can know that weights moved."""
    runs = []
    for model in (wrap(strategy), build()):
        optimizer: torch.optim.Optimizer = TwoPhase(model.parameters())
        if isinstance(model, MegatronFSDP):
            optimizer = fully_shard_optimizer(optimizer)
        for batch in batches(3):

            def closure(model: Any = model, optimizer: torch.optim.Optimizer = optimizer, batch: Any = batch) -> float:
                optimizer.zero_grad()
                return backward(model, batch)

            optimizer.step(closure)
        runs.append(whole_weights(model))
    assert largest_difference(*runs) <= 5 * TOLERANCE


@on_ranks(2)
def test_an_optimizer_whose_model_is_gone_says_so() -> None:
    model = wrap(3)
    optimizer = connected_sgd(model)
    train(model, optimizer, 1)
    del model
    gc.collect()
    for call in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(ConfigurationError, match="has been deleted; build a new optimizer for a new model"):
            call()
