"""Gradients that hold NaN or infinity are reported on every rank, with parameter and rank, and training can go on."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import MegatronFSDPError
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, train, weights

STRATEGIES = [0, 1, 2, 3]


def wrap(strategy: int, **arguments: Any) -> MegatronFSDP:
    return fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **arguments)


def spoilt(model: MegatronFSDP, value: float, rank: int) -> str:
    """A backward in which one rank's gradient of one bias holds `value`; returns what was raised."""
    layer = model.module.layers[1].linear  # type: ignore[union-attr, index]

    def spoil(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == rank:
            # Only the gradient of the bias' first element becomes bad: its sum runs over the samples.
            output.register_hook(lambda grad: grad.index_fill(1, torch.tensor([0]), value))
        return output

    handle = layer.register_forward_hook(spoil)
    try:
        backward(model, next(batches(1)))
    except MegatronFSDPError as error:
        return f"{type(error).__name__} {isinstance(error, ValueError)}: {error}"
    finally:
        handle.remove()
    return ""


def report_and_go_on(strategy: int, value: float, auto_sync: bool) -> tuple[str, float]:
    """The message, and the distance to one process that never saw the bad batch."""
    model = wrap(strategy, report_nan_in_param_grad=True, sync_model_each_microbatch=auto_sync)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, 2)
    message = spoilt(model, value, rank=1)
    optimizer.zero_grad()
    train(model, optimizer, 2, first=2)
    reference = build()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 4)
    return message, largest_difference(weights(model), weights(reference))


@pytest.mark.parametrize(
    ("strategy", "value", "auto_sync"),
    [(0, float("nan"), True), (1, float("inf"), False), (2, float("nan"), False), (3, float("-inf"), True)],
)
def test_every_rank_names_parameters_and_rank_and_training_goes_on(
    strategy: int, value: float, auto_sync: bool, run_ranks: RunRanks
) -> None:
    (first, first_difference), (second, second_difference) = run_ranks(2, report_and_go_on, strategy, value, auto_sync)
    assert first == second
    assert first.startswith("NonFiniteGradientError True: the gradients of ")
    assert "hold NaN or infinity before reduction: " in first
    assert "layers.1.linear.bias (layers.1) on rank [1]" in first
    assert "head." not in first  # the gradients behind the bad one are good
    assert "on rank [0" not in first
    assert max(first_difference, second_difference) <= 2e-6


def class_with_config() -> str:
    model = wrap(3, check_for_nan_in_grad=None, report_nan_in_param_grad=True)
    return spoilt(model, float("nan"), rank=0)


def test_the_rank_that_saw_it_is_named(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, class_with_config)
    assert first == second
    assert "layers.1.linear.bias (layers.1) on rank [0]" in first
    assert "on rank [1" not in first


def by_old_keyword() -> str:
    with pytest.warns(FutureWarning, match="check_for_nan_in_grad"):
        model = wrap(1, check_for_nan_in_grad=True)
    return spoilt(model, float("nan"), rank=0)


def test_the_old_keyword_switches_it_on_too(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, by_old_keyword):
        assert "layers.1.linear.bias (layers.1) on rank [0]" in message


def unchecked(strategy: int) -> tuple[str, bool]:
    model = wrap(strategy)
    message = spoilt(model, float("nan"), rank=1)
    grad = model.full_gradients()["layers.1.linear.bias"]
    return message, grad is not None and bool(grad.isnan().any())


@pytest.mark.parametrize("strategy", [0, 3])
def test_without_the_switch_nothing_is_raised_and_the_gradient_is_what_it_is(
    strategy: int, run_ranks: RunRanks
) -> None:
    assert run_ranks(2, unchecked, strategy) == [("", True), ("", True)]


def good_gradients(strategy: int) -> float:
    model = wrap(strategy, report_nan_in_param_grad=True)
    train(model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2)), 3)
    reference = build()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 3)
    return largest_difference(weights(model), weights(reference))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_switch_does_not_change_good_gradients(strategy: int, run_ranks: RunRanks) -> None:
    assert max(run_ranks(2, good_gradients, strategy)) <= 2e-6


# ---- microbatches, several ranks, frozen parameters, precision -------------------------------------------------------


def deferred_and_frozen(strategy: int, bf16_grads: bool) -> tuple[str, str, float]:
    """A bad microbatch whose reduction is deferred, and one that every rank but the first spoils; then good ones."""
    net = build()
    net.layers[0].linear.weight.requires_grad_(requires_grad=False)  # type: ignore[union-attr, operator]
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16 if bf16_grads else None)
    model = fully_shard_model(
        net,
        mesh(),
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
        report_nan_in_param_grad=True,
    )
    with model.no_sync():
        deferred = spoilt(model, float("inf"), rank=1)
    model.zero_grad()
    several = spoilt(model, float("nan"), rank=min(1, dist.get_rank()) * dist.get_rank() or -1)
    model.zero_grad()
    with model.no_sync():
        backward(model, next(batches(1)))
    backward(model, next(batches(1, 1)))
    reference = build()
    for batch in batches(2):
        backward(reference, batch)
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    del wanted["layers.0.linear.weight"]
    shown = {name: grad for name, grad in model.full_gradients().items() if grad is not None}
    return deferred, several, largest_difference(shown, wanted)


@pytest.mark.parametrize(("strategy", "bf16_grads"), [(0, False), (1, True), (2, False), (3, True)])
def test_deferred_microbatches_frozen_parameters_and_several_ranks_are_reported(
    strategy: int, bf16_grads: bool, run_ranks: RunRanks
) -> None:
    everyone = run_ranks(3, deferred_and_frozen, strategy, bf16_grads)
    for deferred, several, difference in everyone:
        assert (deferred, several) == everyone[0][:2]
        assert "layers.1.linear.bias (layers.1) on rank [1]" in deferred
        assert "layers.1.linear.bias (layers.1) on rank [1, 2]" in several
        assert "layers.0.linear.bias (layers.0) on rank [1, 2]" in several
        assert "layers.0.linear.weight" not in deferred + several  # frozen: there is no gradient of it
        assert difference <= (5e-2 if bf16_grads else 2e-6)  # bfloat16 keeps 8 bits of values of about 2
