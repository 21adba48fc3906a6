"""Hooks of the user on parameters, registered before sharding or on the sharded parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, weights
from tests.support.models import MODEL_CASES
from tests.support.sharded_run import Run, Scenario, Setting, check_strategies

STRATEGIES = [0, 1, 2, 3]


def wrap(strategy: int, model: nn.Module | None = None, **arguments: Any) -> MegatronFSDP:
    model = build() if model is None else model
    return fully_shard_model(model, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **arguments)


def whole_gradients(*indices: int) -> dict[str, Tensor]:
    model = build()
    for index in indices:
        backward(model, next(batches(1, index)))
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def shown(model: MegatronFSDP) -> dict[str, Tensor]:
    return {name: grad for name, grad in model.full_gradients().items() if grad is not None}


# ---- when they run -------------------------------------------------------------------------------------------------


def calls_of_both_kinds(strategy: int, decoupled: bool) -> dict[str, Any]:
    """What each hook saw in one sync, and how often it ran in three."""
    model = wrap(strategy, use_decoupled_grad=decoupled)
    attribute = "decoupled_grad" if decoupled else "grad"
    order: list[str] = []
    seen: dict[str, bool] = {}
    for name, param in model.module.named_parameters():

        def on_grad(grad: Tensor, name: str = name, param: nn.Parameter = param) -> None:
            order.append(f"grad {name}")
            seen[name] = isinstance(grad, DTensor) and grad is getattr(param, attribute)

        def on_param(param: nn.Parameter, name: str = name) -> None:
            order.append(f"param {name}")
            seen[name] = seen[name] and getattr(param, attribute).shape == param.shape

        param.register_hook(on_grad)
        param.register_post_accumulate_grad_hook(on_param)
    backward(model, next(batches(1)))
    once = list(order)
    difference = largest_difference(shown(model), whole_gradients(0))
    with model.no_sync():
        backward(model, next(batches(1, 1)))
    deferred = len(order)
    backward(model, next(batches(1, 2)))
    model.finish_grad_sync()  # brings nothing new
    return {"once": once, "seen": seen, "deferred": deferred, "all": len(order), "difference": difference}


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_on_sharded_parameters_run_once_per_sync_in_order(
    run_ranks: RunRanks, strategy: int, decoupled: bool
) -> None:
    first, second, third = run_ranks(3, calls_of_both_kinds, strategy, decoupled)
    assert first["once"] == second["once"] == third["once"]
    names = [name for name, _ in build().named_parameters()]
    root, layers = [n for n in names if "layers" not in n], [n for n in names if "layers" in n]
    assert first["once"] == [f"{kind} {name}" for name in (*root, *layers) for kind in ("grad", "param")]
    for found in (first, second, third):
        assert found["seen"] == dict.fromkeys(found["seen"], True)
        assert len(found["seen"]) == len(names)
        assert (found["deferred"], found["all"]) == (2 * len(names), 4 * len(names))
        assert found["difference"] <= 1e-6


def calls_without_auto_sync() -> list[int]:
    model = wrap(2, sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[int] = []
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: calls.append(1))
    counts = []
    for batch in batches(2):
        backward(model, batch)
        counts.append(len(calls))
    for _ in range(2):
        optimizer.step()
        counts.append(len(calls))
    return counts


def test_without_auto_sync_hooks_wait_for_the_sync(run_ranks: RunRanks) -> None:
    for counts in run_ranks(2, calls_without_auto_sync):
        assert counts == [0, 0, 1, 1]


def unused_and_frozen() -> list[str]:
    case = MODEL_CASES["unused"]
    model = case.build()
    model[1].used.bias.requires_grad_(requires_grad=False)  # type: ignore[index, union-attr]
    wrapped = fully_shard_model(model, fsdp_unit_modules=list(case.unit_classes))
    called: list[str] = []
    for name, param in wrapped.module.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))  # type: ignore[misc]
    case.loss(wrapped, case.make_batch(4, torch.Generator().manual_seed(0))).backward()
    return called


def test_parameters_without_a_gradient_call_no_hook(run_ranks: RunRanks) -> None:
    for called in run_ranks(2, unused_and_frozen):
        assert sorted(called) == ["0.used.bias", "0.used.weight", "1.used.weight", "2.bias", "2.weight"]


def removed(strategy: int) -> int:
    model = wrap(strategy)
    calls: list[int] = []
    param = next(model.parameters())
    for register in (param.register_hook, param.register_post_accumulate_grad_hook):
        register(lambda _: calls.append(1)).remove()  # type: ignore[operator]
    backward(model, next(batches(1)))
    return len(calls)


def test_removed_hooks_do_not_run(run_ranks: RunRanks) -> None:
    assert run_ranks(2, removed, 3) == [0, 0]


# ---- what they may do ----------------------------------------------------------------------------------------------


def halve_and_replace(run: Run) -> None:
    """A tensor hook that returns another gradient; every backward is cleared before the next."""
    for param in run.parameters().values():
        if run.sharded is not None:
            param.register_hook(lambda grad: grad * 0.5)
    for index in range(3):
        run.loss(index).backward()
        if run.sharded is None:
            for param in run.parameters().values():
                if param.grad is not None:
                    param.grad = param.grad * 0.5
        run.step()


def accumulate_on_replaced(run: Run) -> None:
    """What a hook returned is what the next backward adds to; at that sync the hook sees the sum."""
    for param in run.parameters().values():
        if run.sharded is not None:
            param.register_hook(lambda grad: grad * 0.5)
    for index in range(2):
        run.loss(index).backward()
        if run.sharded is None:
            for param in run.parameters().values():
                if param.grad is not None:
                    param.grad.mul_(0.5)
    run.step()


def halve(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def edit_in_place(run: Run) -> None:
    for param in run.parameters().values():
        param.register_post_accumulate_grad_hook(halve)
    for index in range(3):
        run.loss(index).backward()
        if index:
            run.step()


def optimizer_in_backward(run: Run) -> None:
    """Step and clear inside the hook, with one optimizer per parameter."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in run.parameters().values()}

    def step_and_clear(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step_and_clear)
    for index in range(3):
        run.loss(index).backward()
        run.note_gradients()
        run.note_parameters()


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("script", [halve_and_replace, accumulate_on_replaced, edit_in_place, optimizer_in_backward])
@pytest.mark.parametrize("case", ["transformer", "odd_shapes"])
def test_what_hooks_do_equals_one_process(run_ranks: RunRanks, script: Any, case: Any) -> None:
    settings = [Setting(strategy) for strategy in (STRATEGIES[::2] if case == "odd_shapes" else STRATEGIES[1::2])]
    if script is not optimizer_in_backward:
        settings.append(Setting(3, one_call=False))
    check_strategies(run_ranks, 3 if case == "odd_shapes" else 2, Scenario(script, MODEL_CASES[case]), settings)


def replaced_in_a_wider_dtype() -> float:
    """Gradients that are cast copies of the main gradients can be replaced and added to as well."""
    model = wrap(3, mixed_precision_policy=MixedPrecisionPolicy(torch.float64, torch.float32))
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    for batch in batches(2):
        backward(model, batch)
    first, second = whole_gradients(0), whole_gradients(1)
    wanted = {name: (first[name].double() * 0.5 + second[name].double()) * 0.5 for name in first}
    return largest_difference(shown(model), wanted)


def test_cast_gradients_can_be_replaced(run_ranks: RunRanks) -> None:
    assert max(run_ranks(2, replaced_in_a_wider_dtype)) <= 1e-6


def wrong_answers() -> list[str]:
    messages = []
    model = wrap(3)
    for answer in (lambda grad: grad.to_local().clone(), lambda grad: grad.double(), lambda _: "nothing"):
        handle = model.module.head.bias.register_hook(answer)  # type: ignore[union-attr, operator]
        with pytest.raises(ConfigurationError) as raised:
            backward(model, next(batches(1)))
        messages.append(str(raised.value))
        handle.remove()
    model.module.head.bias.register_post_accumulate_grad_hook(lambda param: param)  # type: ignore[union-attr, operator]
    with pytest.raises(ConfigurationError) as raised:
        backward(model, next(batches(1)))
    return [*messages, str(raised.value)]


def test_a_hook_that_returns_something_else_is_refused_by_name(run_ranks: RunRanks) -> None:
    for local, wider, text, answered in run_ranks(2, wrong_answers):
        assert local.startswith("a gradient hook of head.bias returned a Tensor (torch.float32 (")
        assert wider.startswith("a gradient hook of head.bias returned a UnevenDTensor (torch.float64 (3,)) where")
        assert text.startswith("a gradient hook of head.bias returned a str (no tensor) where")
        assert answered.startswith("a post-accumulate-grad hook of head.bias returned a UnevenDTensor")


# ---- registered before sharding ------------------------------------------------------------------------------------


def carried_over(strategy: int) -> tuple[list[str], float]:
    model = build()
    kinds: list[str] = []

    def halve(param: nn.Parameter) -> None:
        kinds.append(type(param.grad).__name__)
        assert param.grad is not None
        param.grad.mul_(0.5)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halve)
    wrapped = wrap(strategy, model)
    backward(wrapped, next(batches(1)))
    wanted = {name: grad * 0.5 for name, grad in whole_gradients(0).items()}
    return kinds, largest_difference(shown(wrapped), wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_post_accumulate_hooks_from_before_sharding_see_the_reduced_gradient(
    run_ranks: RunRanks, strategy: int
) -> None:
    for kinds, difference in run_ranks(2, carried_over, strategy):
        assert kinds == ["UnevenDTensor"] * 7
        assert difference <= 1e-6


def stale_gradients(strategy: int) -> float:
    """Clearing by hand between two syncs that bring nothing new must not bring gradients back."""
    model = wrap(strategy, sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model, next(batches(1)))
    optimizer.step()
    before = weights(model)
    optimizer.zero_grad()
    optimizer.step()
    return largest_difference(weights(model), before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_without_a_backward_after_clearing_changes_nothing(run_ranks: RunRanks, strategy: int) -> None:
    assert run_ranks(2, stale_gradients, strategy) == [0.0, 0.0]
