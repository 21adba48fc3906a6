"""Delayed weight gradients: the bits of those that are not, when they are computed, and what is left alone."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.formats import delayed_linear
from megatron_fsdp.formats.delayed_linear import DelayedLinear, delayed_weight_gradients
from tests.support.case import Tolerance, assert_values
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, on_ranks
from tests.support.zoo import FEATURES, Layer, Recomputed

Play = Callable[[nn.Module, Tensor], Tensor]


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers: four weights that can be delayed, and two biases."""
    with fixed_seed(0):
        model = nn.Sequential(Layer(), Layer()).to(dtype)
    for layer in model:
        layer.get_submodule("down").register_parameter("bias", None)
    return model


def backward(model: nn.Module, tensor: Tensor) -> Tensor:
    output: Tensor = model(tensor)
    output.square().sum().backward()
    return output


def twice_deferred(model: nn.Module, tensor: Tensor) -> Tensor:
    with model.no_sync():  # type: ignore[operator]
        backward(model, tensor)
    return backward(model, tensor)


def retained(model: nn.Module, tensor: Tensor) -> Tensor:
    output: Tensor = model(tensor)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    return output


def without_input_gradient(model: nn.Module, tensor: Tensor) -> Tensor:
    return backward(model, tensor.detach())


def forward_in_autocast(model: nn.Module, tensor: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(tensor)
    output.float().square().sum().backward()
    return output


def autograd_of_the_input(model: nn.Module, tensor: Tensor) -> Tensor:
    (tensor.grad,) = torch.autograd.grad(model(tensor).square().sum(), [tensor])
    return tensor.grad


def backward_to_the_input(model: nn.Module, tensor: Tensor) -> Tensor:
    output: Tensor = model(tensor)
    output.square().sum().backward(inputs=[tensor])
    return output


class _Asks(nn.Module):
    """Asks for the gradient of a weight inside of a forward, where it is full."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.found: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        (self.found,) = torch.autograd.grad(self.inner(x).square().sum(), [self.inner.weight])
        return self.inner(x)


def autograd_of_a_weight(model: nn.Module, tensor: Tensor) -> Tensor:
    pair = model.module[0]  # type: ignore[index, union-attr]
    pair.up = _Asks(pair.up)
    backward(model, tensor)
    assert pair.up.found is not None
    return pair.up.found


def twice_differentiated(model: nn.Module, tensor: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(model(tensor).square().sum(), [tensor], create_graph=True)
    (tensor.grad,) = torch.autograd.grad(slope.square().sum(), [tensor])
    return slope


def watched(model: nn.Module, tensor: Tensor) -> Tensor:
    """A hook of the user on a full weight, put there from inside."""
    seen = []
    inner = model.module[0].up  # type: ignore[index, union-attr]
    handle = inner.register_forward_pre_hook(lambda m, _: seen.append(m.weight.register_hook(lambda g: 2 * g)) and None)
    output = backward(model, tensor)
    handle.remove()
    assert len(seen) == 1
    return output


def wrap(model: nn.Module, delayed: bool = True, strategy: str | None = "optim_grads_params") -> Any:
    """Shard a model in units, its layers if there are any; without a strategy in buckets."""
    config = DistributedDataParallelConfig(delay_wgrad_compute=delayed, megatron_fsdp_main_params_dtype=None)
    if strategy is None:
        return DistributedDataParallel(config, model)
    config.use_megatron_fsdp, config.data_parallel_sharding_strategy = True, strategy
    classes = [Layer] if any(isinstance(inner, Layer) for inner in model.modules()) else []
    return DistributedDataParallel(config, model, fsdp_unit_modules=classes)


class Seen:
    """Gradients of a run, and what happened to those that were delayed, in order."""

    def __init__(self, model: Any, play: Play, tensor: Tensor) -> None:
        self.events: list[str] = []
        put, compute = delayed_linear.WeightGradientQueue.put, delayed_linear._Product.compute

        def watched_put(*args: Any) -> bool:
            found = put(*args)
            self.events.append("delayed" if found else "at once")
            return found

        def watched_compute(product: Any) -> Tensor:
            self.events.append("computed")
            return compute(product)

        tensor.register_hook(lambda _grad: self.events.append("input gradient"))
        with (
            mock.patch.object(delayed_linear.WeightGradientQueue, "put", watched_put),
            mock.patch.object(delayed_linear._Product, "compute", watched_compute),
        ):
            output = play(model, tensor).detach()
        model.finish_grad_sync()
        self.values = {**model.full_gradients(), "input": tensor.grad, "output": output}


def compare(
    make: Callable[[], nn.Module], play: Play = backward, tensor: Tensor | None = None, strategy: str | None = None
) -> list[str]:
    """Run a model with and without delay, and compare all bits; returns the events of the former."""
    drawn = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(1)) if tensor is None else tensor
    off, on = (Seen(wrap(make(), delayed, strategy), play, drawn.clone().requires_grad_()) for delayed in (False, True))
    assert off.events == ["input gradient"] * len(off.events)
    assert_values(on.values, off.values, Tolerance())
    return on.events


def in_autocast(model: nn.Module, tensor: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(tensor)
        output.float().square().sum().backward()
    return output


def of_parts(model: nn.Module, tensor: Tensor) -> Tensor:
    """A loss of what a unit does not return."""
    escaped = []
    handle = model.module[0].down.register_forward_hook(lambda _m, _a, output: escaped.append(output))  # type: ignore[index, union-attr]
    output: Tensor = model(tensor)
    handle.remove()
    escaped[0].square().sum().backward()
    return output


PLAYS: dict[str, tuple[Play, int, Tensor | None]] = {
    "matrix": (backward, 4, None),
    "three dimensions": (backward, 4, torch.ones(2, 3, FEATURES)),
    "vector": (backward, 0, torch.ones(FEATURES)),
    "no rows": (backward, 4, torch.ones(0, FEATURES)),
    "bfloat16": (backward, 4, torch.ones(4, FEATURES, dtype=torch.bfloat16)),
    "deferred": (twice_deferred, 8, None),
    "retained": (retained, 8, None),
    "input without gradient": (without_input_gradient, 4, None),
    "forward in autocast": (forward_in_autocast, 4, None),
    "all in autocast": (in_autocast, 4, None),
    "float64 in autocast": (in_autocast, 4, torch.ones(4, FEATURES, dtype=torch.float64)),
    "gradient of the input": (autograd_of_the_input, 0, None),
    "backward to the input": (backward_to_the_input, 0, None),
    "gradient of a weight": (autograd_of_a_weight, 4, None),
    "hook": (watched, 3, None),
}


@on_ranks(2)
def test_bits_are_those_of_gradients_at_once() -> None:
    for strategy in (None, "optim", "optim_grads_params"):
        for name, (play, count, tensor) in PLAYS.items():
            dtype = torch.float32 if tensor is None else tensor.dtype
            events = compare(partial(build, dtype), play, tensor, strategy)
            assert events.count("delayed") == events.count("computed") == count, f"{name}, {strategy}"
    for strategy in (None, "optim"):  # where the weights of a unit are there without its backward
        assert compare(build, of_parts, None, strategy).count("computed") == 2
    assert "delayed" not in compare(build, twice_differentiated, None, "optim")


def recomputed(reentrant: bool) -> nn.Module:
    with fixed_seed(0):
        return Recomputed("units", reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_recomputed_blocks_delay_to_the_end_of_the_whole_backward(reentrant: bool) -> None:
    for strategy in (None, "optim_grads_params"):
        events = compare(lambda: recomputed(reentrant), strategy=strategy)
        assert events == [*["delayed"] * 10, "input gradient", *["computed"] * 10]


class Shared(nn.Module):
    """A linear that is called twice and shares its weight with another one, a head that is tied to an embedding, and a
    linear one of whose gradients comes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.head, self.last = (nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.embedding = nn.Embedding(FEATURES, FEATURES)
        self.other.weight, self.head.weight = self.one.weight, self.embedding.weight

    def forward(self, tensor: Tensor) -> Tensor:
        hidden = self.other(torch.tanh(self.one(torch.tanh(self.one(tensor)))))
        output = self.head(hidden + self.embedding(torch.arange(4)))
        return self.last(output) + self.last(output[0])


@on_ranks(2)
def test_shared_weights_get_one_sum_and_tied_ones_are_left_alone() -> None:
    for strategy in (None, "optim_grads_params"):
        assert compare(Shared, strategy=strategy).count("computed") == 4


class _OwnLinear(nn.Linear):
    pass


def test_other_linears_are_left_alone_and_a_failure_undoes_the_rest() -> None:
    patched, frozen, odd = nn.Linear(5, 5), nn.Linear(5, 5), nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    patched.forward = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    frozen.weight.requires_grad_(False)
    tied = nn.Linear(5, 5)
    tied.weight = patched.weight
    model = nn.Sequential(_OwnLinear(5, 5), patched, frozen, odd, tied, nn.MultiheadAttention(4, 2), nn.Linear(5, 5))
    names = list(model.state_dict())
    with contextlib.suppress(KeyError), delayed_weight_gradients(model):
        assert [name for name, inner in model.named_modules() if isinstance(inner, DelayedLinear)] == ["6"]
        assert list(model.state_dict()) == names
        for copied in (copy.deepcopy(model[6]), pickle.loads(pickle.dumps(model[6]))):
            assert type(copied) is nn.Linear
            assert copied(torch.ones(5)).equal(model[6](torch.ones(5)))
            assert not any("delayed" in name for name in vars(copied))
        raise KeyError
    assert type(model[6]) is nn.Linear
    assert vars(model[6]).keys() == vars(nn.Linear(5, 5)).keys()


@on_ranks(1)
def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no effect on this Sequential, which has no plain nn\.Linear"):
        wrap(nn.Sequential(_OwnLinear(5, 5)))
    with pytest.raises(ConfigurationError, match="backward_dw was called with delay_wgrad_compute=False, where no"):
        wrap(build(), delayed=False).backward_dw()


@pytest.mark.parametrize("strategy", [None, "optim_grads_params"])
@on_ranks(2)
def test_weight_gradients_are_computed_earlier_on_demand(strategy: str | None) -> None:
    def play(model: Any, tensor: Tensor) -> Tensor:
        if model._engine.delayed is not None:
            tensor.register_hook(lambda _grad: model.backward_dw())
        return backward(model, tensor * 1)

    assert compare(build, play, None, strategy)[-5:] == ["input gradient", *["computed"] * 4]


@on_ranks(1)
def test_what_was_changed_in_place_while_a_gradient_waits_is_noticed_and_a_failed_backward_leaves_nothing() -> None:
    model = wrap(build())
    inputs: list[weakref.ref[Tensor]] = []

    def spoil(_module: nn.Module, args: tuple[Tensor]) -> None:
        inputs.append(weakref.ref(args[0]))

        given = args[0].detach()
        args[0].register_hook(lambda _grad: given.zero_() is None or None)

    handle = model.module[0].up.register_forward_pre_hook(spoil)
    with pytest.raises(ScheduleError, match="was modified by an in-place operation while its weight gradient waited"):
        backward(model, torch.ones(4, FEATURES, requires_grad=True) * 1)
    handle.remove()
    model.reset()
    gc.collect()
    assert inputs[0]() is None
    model.zero_grad()
    backward(model, torch.ones(4, FEATURES))
    expected = wrap(build(), delayed=False)
    backward(expected, torch.ones(4, FEATURES))
    assert_equal_tensors(model.full_gradients(), expected.full_gradients())


@pytest.mark.gpu
@on_ranks(1)
def test_linears_on_a_stream_of_their_own() -> None:
    def play(model: nn.Module, tensor: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output: Tensor = model(tensor)
            loss = output.square().sum()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        return output

    assert compare(lambda: build().cuda(), play, torch.ones(64, FEATURES, device="cuda")).count("computed") == 4
