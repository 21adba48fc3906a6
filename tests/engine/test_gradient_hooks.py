"""Hooks of the user on parameters, registered before sharding or on the sharded parameters."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.api_net import build, gradients, largest_difference, run_batch, summed_gradients, wrap
from tests.support.case import Run, Scenario, Setting, check_strategies
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.zoo import MODEL_CASES

# ---- when they run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "decoupled"), [(0, False), (3, True)])
@on_ranks(3)
def test_hooks_on_sharded_parameters_run_once_per_sync_in_order(strategy: int, decoupled: bool) -> None:
    model = wrap(strategy, use_decoupled_grad=decoupled)
    attribute = "decoupled_grad" if decoupled else "grad"
    order: list[str] = []
    for name, param in model.module.named_parameters():

        def on_grad(grad: Tensor, name: str = name, param: nn.Parameter = param) -> None:
            assert isinstance(grad, DTensor)
            assert grad is getattr(param, attribute)
            order.append(f"grad {name}")

        def on_param(param: nn.Parameter, name: str = name) -> None:
            assert getattr(param, attribute).shape == param.shape
            order.append(f"param {name}")

        param.register_hook(on_grad)
        param.register_post_accumulate_grad_hook(on_param)
    run_batch(model, 0)
    names = [name for name, _ in build().named_parameters()]
    root_first = sorted(names, key=lambda name: "layers" in name)
    assert order == [f"{kind} {name}" for name in root_first for kind in ("grad", "param")]
    assert largest_difference(gradients(model), summed_gradients(0)) <= 1e-6
    with model.no_sync():
        run_batch(model, 1)
    assert len(order) == 2 * len(names)
    run_batch(model, 2)
    model.finish_grad_sync()  # brings nothing new
    assert len(order) == 4 * len(names)


@on_ranks(2)
def test_parameters_without_a_gradient_call_no_hook_and_removed_hooks_do_not_run() -> None:
    case = MODEL_CASES["unused"]
    model = case.build()
    model[1].used.bias.requires_grad_(False)
    wrapped = fully_shard_model(model, fsdp_unit_modules=list(case.unit_classes))
    called: list[str] = []
    for name, param in wrapped.module.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
            for register in (param.register_hook, param.register_post_accumulate_grad_hook):
                register(lambda _: called.append("removed")).remove()
    case.loss(wrapped, case.make_batch(4, torch.Generator().manual_seed(0))).backward()
    assert sorted(called) == ["0.used.bias", "0.used.weight", "1.used.weight", "2.bias", "2.weight"]


# ---- what they may do ------------------------------------------------------------------------------------------------


def halve_on_one_process(run: Run) -> None:
    """What a tensor hook of the sharded model has done."""
    for param in run.parameters().values():
        if run.sharded is None and param.grad is not None:
            param.grad = param.grad * 0.5


def halve_and_replace(run: Run) -> None:
    """A tensor hook that returns another gradient; every backward is cleared before the next."""
    if run.sharded is not None:
        for param in run.parameters().values():
            param.register_hook(lambda grad: grad * 0.5)
    for index in range(3):
        run.loss(index).backward()
        halve_on_one_process(run)
        run.step()


def accumulate_on_replaced(run: Run) -> None:
    """What a hook returned is what the next backward adds to; at that sync the hook sees the sum."""
    if run.sharded is not None:
        for param in run.parameters().values():
            param.register_hook(lambda grad: grad * 0.5)
    for index in range(2):
        run.loss(index).backward()
        halve_on_one_process(run)
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


@pytest.mark.parametrize(
    ("script", "case"),
    [
        (halve_and_replace, "transformer"),
        (accumulate_on_replaced, "odd_shapes"),
        (edit_in_place, "transformer"),
        (optimizer_in_backward, "transformer"),
    ],
)
def test_what_hooks_do_equals_one_process(run_ranks: RunRanks, script: Any, case: Any) -> None:
    settings = [Setting(strategy) for strategy in ((0, 2) if case == "odd_shapes" else (1, 3))]
    if script is not optimizer_in_backward:
        settings.append(Setting(3, one_call=False))
    check_strategies(run_ranks, 3 if case == "odd_shapes" else 2, Scenario(script, MODEL_CASES[case]), settings)


@on_ranks(2)
def test_a_hook_that_returns_something_else_is_refused_by_name() -> None:
    model = wrap()
    bias = model.module.head.bias

    returned = "a gradient hook of head.bias returned a"
    for answer, said in (
        (lambda grad: grad.to_local().clone(), "Tensor (torch.float32 ("),
        (lambda grad: grad.double(), "UnevenDTensor (torch.float64 (3,)) where"),
        (lambda _: "nothing", "str (no tensor) where"),
    ):
        handle = bias.register_hook(answer)
        with pytest.raises(ConfigurationError, match="^" + re.escape(f"{returned} {said}")):  # of this rank
            run_batch(model, 0)
        handle.remove()
    bias.register_post_accumulate_grad_hook(lambda param: param)
    returned = "a post-accumulate-grad hook of head.bias returned a UnevenDTensor"
    assert refusal(run_batch, model, 0, error=ConfigurationError).startswith(returned)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_post_accumulate_hooks_from_before_sharding_see_the_reduced_gradient(strategy: int) -> None:
    model = build()
    kinds: list[str] = []

    def note_and_halve(param: nn.Parameter) -> None:
        kinds.append(type(param.grad).__name__)
        halve(param)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note_and_halve)
    wrapped = wrap(strategy, model)
    run_batch(wrapped, 0)
    assert kinds == ["UnevenDTensor"] * 7
    assert largest_difference(gradients(wrapped), {n: grad * 0.5 for n, grad in summed_gradients(0).items()}) <= 1e-6


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_asked_for_by_a_sharded_parameter_autograd_gives_this_ranks_gradient(strategy: int) -> None:
    x = torch.arange(8.0).view(2, 4) + dist.get_rank()
    with fixed_seed(0):
        alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = fully_shard_model(copy.deepcopy(alone), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
    model.module[2].bias.requires_grad_(False)
    alone[2].bias.requires_grad_(False)
    for _ in range(2):
        found, wanted = model(x).square().mean(), alone(x).square().mean()
        names = [name for name, param in alone.named_parameters() if param.requires_grad]
        (one,) = torch.autograd.grad(found, model.module[1].weight, retain_graph=True, allow_unused=True)
        sharded, plain = dict(model.module.named_parameters()), dict(alone.named_parameters())
        asked = torch.autograd.grad(found, [sharded[n] for n in names], retain_graph=True)
        expected = torch.autograd.grad(wanted, [plain[n] for n in names], retain_graph=True)
        torch.testing.assert_close(asked, expected)
        torch.testing.assert_close(one, expected[names.index("1.weight")])
        found.backward()
        wanted.backward()
        for param in plain.values():
            if param.grad is not None:
                dist.all_reduce(param.grad.div_(2))
        assert largest_difference(gradients(model), gradients(alone)) <= 1e-5
        model.zero_grad()
        alone.zero_grad()
    model(x).square().mean().backward(inputs=[model.module[1].weight])
    alone(x).square().mean().backward(inputs=[alone[1].weight])
    assert alone[1].weight.grad is not None
    dist.all_reduce(alone[1].weight.grad.div_(2))
    shown = model.full_gradients()["1.weight"]
    assert shown is not None
    torch.testing.assert_close(shown, alone[1].weight.grad)
    spare = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="at index 1 was not used in the graph"):
        torch.autograd.grad(model(x).sum(), [model.module[1].weight, spare])
    create = lambda net, weight: torch.autograd.grad(net(x).square().mean(), weight, create_graph=True)  # noqa: E731
    if strategy == 3:
        with pytest.raises(ScheduleError, match="create_graph=True"):
            create(model, model.module[1].weight)
        model.reset()
    else:
        torch.testing.assert_close(create(model, model.module[1].weight), create(alone, alone[1].weight))
