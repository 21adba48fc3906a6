"""Linears with delayed weight gradients: the numbers of `nn.Linear`, and everything that autograd promises."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron_fsdp.engine.delayed_linear import (
    DelayedLinear,
    WeightGradientQueue,
    delay_weight_gradients,
    undelay_weight_gradients,
)
from megatron_fsdp.errors import ConfigurationError, ScheduleError


class Net(nn.Module):
    """Three linears and a norm between them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=bias)
        self.norm = nn.LayerNorm(7)
        self.middle = nn.Linear(7, 7, bias=bias)
        self.last = nn.Linear(7, 3, bias=bias)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.middle(self.norm(self.first(tensor)))))


def twins(make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module, WeightGradientQueue]:
    """A plain model, an equal one that delays, and its queue."""
    torch.manual_seed(0)
    plain = make()
    delayed, queue = copy.deepcopy(plain), WeightGradientQueue()
    assert delay_weight_gradients(delayed, queue)
    return plain, delayed, queue


def assert_same_gradients(plain: nn.Module, delayed: nn.Module) -> None:
    for (name, expected), (other, found) in zip(plain.named_parameters(), delayed.named_parameters(), strict=True):
        assert name == other
        assert (expected.grad is None) == (found.grad is None), name
        if expected.grad is not None and found.grad is not None:
            assert found.grad.dtype == expected.grad.dtype
            assert found.grad.stride() == expected.grad.stride()
            assert torch.equal(found.grad, expected.grad), name


SHAPES = [(4, 5), (3, 4, 5), (2, 3, 4, 5), (5,), (0, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_three_steps_equal_those_of_plain_linears_bit_for_bit(bias: bool, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        plain, delayed, queue = twins(lambda: Net(bias).to(dtype))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, delayed)]
        for _ in range(3):
            inputs = torch.randn(shape, dtype=dtype)
            input_grads = []
            for model, optimizer in zip((plain, delayed), optimizers, strict=True):
                leaf = inputs.clone().requires_grad_()
                model(leaf).float().pow(2).sum().backward()
                input_grads.append(leaf.grad)
                if model is delayed:
                    assert len(queue) == 0
                    assert_same_gradients(plain, delayed)
                optimizer.step()
            assert torch.equal(*input_grads)  # type: ignore[arg-type]
            plain.zero_grad()
            delayed.zero_grad()
        for expected, found in zip(plain.parameters(), delayed.parameters(), strict=True):
            assert torch.equal(expected, found)


def test_gradients_accumulate_over_backwards_of_any_inputs_and_kept_graphs() -> None:
    plain, delayed, _ = twins()
    for _ in range(3):
        inputs = torch.randn(4, 5)
        for model in (plain, delayed):
            model(inputs).pow(2).sum().backward()
    assert_same_gradients(plain, delayed)
    plain, delayed, _ = twins()
    inputs = torch.randn(5, 4, 3).permute(2, 1, 0)
    for model in (plain, delayed):
        model(inputs).sum().backward()
    for expected, found in zip(plain.parameters(), delayed.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    plain, delayed, _ = twins()
    inputs = torch.randn(4, 5)
    for model in (plain, delayed):
        loss = model(inputs).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(plain, delayed)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_computes_as_with_plain_linears(backward_inside: bool) -> None:
    plain, delayed, _ = twins()
    inputs = torch.randn(4, 5)
    for model in (plain, delayed):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
            assert output.dtype is torch.bfloat16
            if backward_inside:
                output.float().pow(2).sum().backward()
        if not backward_inside:
            output.float().pow(2).sum().backward()
    assert_same_gradients(plain, delayed)


def test_autocast_changes_neither_backward_precision_nor_float64_nor_keeps_casts() -> None:
    plain, delayed, _ = twins(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    inputs = torch.randn(4, 5)
    plain(inputs).pow(2).sum().backward()
    loss = delayed(inputs).pow(2).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert_same_gradients(plain, delayed)
    linear, queue = nn.Linear(5, 5, bias=False), WeightGradientQueue()
    delay_weight_gradients(linear, queue)
    inputs = torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        linear(inputs)
        plain_use = F.linear(inputs, linear.weight)
    assert plain_use.requires_grad
    plain, delayed, _ = twins(lambda: nn.Sequential(nn.Linear(5, 3).double()))
    for model in (plain, delayed):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.ones(4, 5, dtype=torch.float64))
        assert output.dtype is torch.float64
        output.sum().backward()
    assert_same_gradients(plain, delayed)


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]])
@pytest.mark.parametrize("input_learns", [True, False])
def test_frozen_parts_get_no_gradient(frozen: list[str], input_learns: bool) -> None:
    plain, delayed, queue = twins(lambda: nn.Sequential(nn.Linear(5, 3)))
    grads = []
    for model in (plain, delayed):
        for name in frozen:
            model.get_parameter(f"0.{name}").requires_grad_(False)
        inputs = torch.ones(4, 5, requires_grad=input_learns)
        output = model(inputs)
        assert output.requires_grad == (input_learns or len(frozen) < 2)
        if output.requires_grad:
            output.pow(2).sum().backward()
        grads.append(inputs.grad)
    assert_same_gradients(plain, delayed)
    assert (grads[0] is None) == (grads[1] is None)
    assert grads[0] is None or torch.equal(*grads)  # type: ignore[arg-type]
    assert len(queue) == 0


class Twice(nn.Module):
    """A linear that is called twice, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.other = nn.Linear(5, 5)
        self.other.weight = self.one.weight

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.other(F.gelu(self.one(F.gelu(self.one(tensor)))))


def test_shared_weights_get_one_sum_and_call_hooks_once() -> None:
    plain, delayed, _ = twins(Twice)
    calls: list[int] = []
    delayed.get_parameter("one.weight").register_post_accumulate_grad_hook(lambda _param: calls.append(1))
    inputs = torch.randn(4, 5)
    for model in (plain, delayed):
        model(inputs).pow(2).sum().backward()
    assert_same_gradients(plain, delayed)
    assert calls == [1]


class Tied(nn.Module):
    """An embedding and an output layer with one weight, and a linear that is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 6)
        self.head.weight = self.embedding.weight
        self.second_head = nn.Linear(5, 6)
        self.second_head.bias = self.head.bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embedding(tokens))
        return self.head(hidden) + self.second_head(hidden)


def test_linears_tied_to_what_is_not_delayed_are_left_alone() -> None:
    torch.manual_seed(0)
    plain = Tied()
    delayed = copy.deepcopy(plain)
    assert delay_weight_gradients(delayed, WeightGradientQueue()) == ["inner"]
    calls: list[int] = []
    delayed.embedding.weight.register_post_accumulate_grad_hook(lambda _param: calls.append(1))
    for model in (plain, delayed):
        model(torch.arange(6)).pow(2).sum().backward()
    assert_same_gradients(plain, delayed)
    assert calls == [1]


def test_gradients_of_given_inputs_leave_parameters_alone() -> None:
    plain, delayed, queue = twins()
    inputs = torch.randn(4, 5, requires_grad=True)
    expected, found = (torch.autograd.grad(model(inputs).pow(2).sum(), [inputs])[0] for model in (plain, delayed))
    assert torch.equal(expected, found)
    assert len(queue) == 0
    assert all(param.grad is None for param in delayed.parameters())
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(delayed(inputs).sum(), [delayed.get_parameter("last.weight")])
    _, delayed, queue = twins()
    with torch.no_grad():
        assert not delayed(torch.ones(4, 5)).requires_grad
    with torch.inference_mode():
        delayed(torch.ones(4, 5))
    assert len(queue) == 0
    _, delayed, queue = twins()
    inputs = torch.randn(4, 5, requires_grad=True)
    with pytest.raises(ScheduleError, match="was differentiated with create_graph=True, which needs that gradient"):
        torch.autograd.grad(delayed(inputs).sum(), [inputs], create_graph=True)
    assert len(queue) == 0


def test_what_was_changed_in_place_is_noticed_also_while_a_gradient_waits() -> None:
    _, delayed, queue = twins()
    inputs = torch.randn(4, 5, requires_grad=True)
    loss = delayed(inputs).sum()
    with torch.no_grad():
        delayed.get_parameter("middle.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert len(queue) == 0
    linear, queue = nn.Linear(5, 3), WeightGradientQueue()
    delay_weight_gradients(linear, queue)
    leaf = torch.randn(4, 5, requires_grad=True)
    inputs = leaf * 2

    def reuse(_grad: torch.Tensor) -> None:
        with torch.no_grad():
            inputs.zero_()

    leaf.register_hook(reuse)
    with pytest.raises(ScheduleError, match="was modified by an in-place operation while its weight gradient waited"):
        linear(inputs).sum().backward()
    assert len(queue) == 0
    assert linear.weight.grad is None


def test_a_delayed_model_looks_like_a_plain_one() -> None:
    plain, delayed, queue = twins()
    names = ["first", "middle", "last"]
    assert delay_weight_gradients(delayed, queue) == names  # once more is the same
    assert list(delayed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in delayed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(delayed.get_submodule(name), nn.Linear) for name in names)
    with pytest.raises(ConfigurationError, match="the weight gradient of first is delayed in another queue already"):
        delay_weight_gradients(delayed, WeightGradientQueue())
    assert undelay_weight_gradients(delayed) == names
    assert {type(delayed.get_submodule(name)) for name in names} == {nn.Linear}
    assert not any(name.startswith("_delayed") for name in vars(delayed.get_submodule("first")))


def test_copies_are_plain() -> None:
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        plain, delayed, _ = twins()
        other = copied(delayed)
        assert {type(module) for module in other.children()} == {nn.Linear, nn.LayerNorm}
        assert isinstance(delayed.get_submodule("first"), DelayedLinear)
        for model in (plain, other):
            model(torch.ones(4, 5)).sum().backward()
        assert_same_gradients(plain, other)


class _OwnLinear(nn.Linear):
    pass


def test_other_linears_are_left_alone() -> None:
    patched = nn.Linear(5, 5)
    patched.forward = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    model = nn.Sequential(_OwnLinear(5, 5), patched, normed, nn.MultiheadAttention(4, 2), nn.Linear(5, 5))
    assert delay_weight_gradients(model, WeightGradientQueue()) == ["4"]
    linear, queue = nn.Linear(5, 5, bias=False), WeightGradientQueue()
    delay_weight_gradients(linear, queue)
    source = torch.ones(5, 5, requires_grad=True)
    torch.func.functional_call(linear, {"weight": source * 2}, torch.ones(3, 5)).sum().backward()
    assert source.grad is not None
    assert torch.equal(source.grad, torch.full((5, 5), 6.0))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler reads it
def test_a_compiled_model_stays_right() -> None:
    plain, delayed, queue = twins()
    compiled = torch.compile(delayed, backend="eager")
    inputs = torch.randn(4, 5)
    for _ in range(2):
        plain(inputs).pow(2).sum().backward()
        compiled(inputs).pow(2).sum().backward()
    assert len(queue) == 0
    assert_same_gradients(plain, delayed)


@pytest.mark.gpu
def test_linears_on_a_stream_of_their_own() -> None:
    plain, delayed, _ = twins(lambda: Net().cuda())
    inputs, stream = torch.randn(64, 5, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    for model in (plain, delayed):
        with torch.cuda.stream(stream):
            loss = model(inputs).pow(2).sum()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
    assert_same_gradients(plain, delayed)
