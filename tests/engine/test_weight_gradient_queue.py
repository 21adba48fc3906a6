"""The queue of delayed weight gradients: order, accumulation, hooks, nested and failing backwards."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.engine.delayed_linear import WeightGradientQueue
from megatron_fsdp.errors import ConfigurationError, ScheduleError


class _InBackward(torch.autograd.Function):
    """Identity that calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.action()
        return grad, None


def backward_with(*actions: Callable[[], Any]) -> None:
    """A backward that takes these actions one after the other."""
    tensor = torch.ones(2, requires_grad=True)
    result = tensor
    for action in reversed(actions):
        result = _InBackward.apply(result, action)
    result.sum().backward()


def leaf() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def grad_of(param: nn.Parameter) -> list[float]:
    assert param.grad is not None
    return param.grad.tolist()


class Record:
    """Events by the name of the parameter."""

    def __init__(self, **params: nn.Parameter) -> None:
        self.events: list[str] = []
        self._names = {id(param): name for name, param in params.items()}

    def __call__(self, event: str, param: torch.Tensor) -> None:
        self.events.append(f"{event} {self._names[id(param)]}")


def test_gradients_are_computed_at_the_end_of_backward_oldest_first() -> None:
    a, b = leaf(), leaf()
    record = Record(a=a, b=b)
    queue = WeightGradientQueue(record)
    lengths: list[int] = []
    backward_with(
        lambda: queue.defer(a, lambda: torch.tensor([1.0, 2.0])),
        lambda: queue.defer(b, lambda: torch.tensor([3.0, 4.0])),
        lambda: record.events.append("last"),
        lambda: lengths.append(len(queue)),
    )
    assert record.events == [
        *("deferred a", "deferred b", "last"),
        *("computed a", "accumulated a", "computed b", "accumulated b"),
    ]
    assert (lengths, len(queue)) == ([2], 0)
    assert grad_of(a) == [1.0, 2.0]
    assert grad_of(b) == [3.0, 4.0]


def test_gradients_of_one_parameter_are_added_up_before_its_hooks() -> None:
    a, b = leaf(), leaf()
    record = Record(a=a, b=b)
    queue = WeightGradientQueue(record)
    seen: list[tuple[str, list[float]]] = []
    a.register_hook(lambda grad: seen.append(("hook", grad.tolist())))
    a.register_hook(lambda grad: grad * 2)
    a.register_post_accumulate_grad_hook(lambda param: seen.append(("after", param.grad.tolist())))
    backward_with(
        lambda: queue.defer(a, lambda: torch.tensor([1.0, 2.0])),
        lambda: queue.defer(b, lambda: torch.ones(2)),
        lambda: queue.defer(a, lambda: torch.tensor([10.0, 20.0])),
    )
    assert seen == [("hook", [11.0, 22.0]), ("after", [22.0, 44.0])]
    assert record.events[3:] == ["computed a", "computed b", "accumulated b", "computed a", "accumulated a"]


def test_a_hook_may_take_the_gradient_away() -> None:
    param, queue = leaf(), WeightGradientQueue()
    taken: list[list[float]] = []

    def take(param: torch.Tensor) -> None:
        assert param.grad is not None
        taken.append(param.grad.tolist())
        param.grad = None

    param.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        backward_with(lambda: queue.defer(param, lambda: torch.ones(2)))
    assert taken == [[1.0, 1.0]] * 2
    assert param.grad is None


def test_who_runs_the_queue_first_gets_everything() -> None:
    param, queue = leaf(), WeightGradientQueue()
    seen: list[int] = []

    def queue_first() -> None:
        def end() -> None:
            queue.run()
            assert param.grad is not None
            seen.append(int(param.grad[0]))

        torch.autograd.Variable._execution_engine.queue_callback(end)

    backward_with(queue_first, lambda: queue.defer(param, lambda: torch.ones(2)))
    assert seen == [1]
    assert grad_of(param) == [1.0, 1.0]


def fail() -> None:
    raise ValueError("on purpose")


def test_what_fails_or_is_cleared_leaves_nothing_behind() -> None:
    param, queue = leaf(), WeightGradientQueue()
    alive: list[weakref.ref[torch.Tensor]] = []

    def defer() -> None:
        activation = torch.ones(2)
        alive.append(weakref.ref(activation))
        queue.defer(param, activation.clone)

    with pytest.raises(ValueError, match="on purpose"):
        backward_with(defer, fail)
    assert len(queue) == 0
    assert alive[0]() is None
    assert param.grad is None
    backward_with(lambda: queue.defer(param, lambda: torch.ones(2)))
    assert grad_of(param) == [1.0, 1.0]
    a, b, queue = leaf(), leaf(), WeightGradientQueue()

    def fails() -> torch.Tensor:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        backward_with(lambda: queue.defer(a, fails), lambda: queue.defer(b, lambda: torch.ones(2)))
    assert len(queue) == 0
    backward_with(lambda: queue.defer(a, lambda: torch.ones(2)))
    assert grad_of(a) == [1.0, 1.0]
    assert b.grad is None
    a, b, queue = leaf(), leaf(), WeightGradientQueue()
    backward_with(
        lambda: queue.defer(a, lambda: torch.ones(2)), queue.clear, lambda: queue.defer(b, lambda: torch.ones(2))
    )
    assert a.grad is None
    assert b.grad is not None
    assert len(queue) == 0


@pytest.mark.parametrize("expected", [True, False])
def test_what_an_inner_backward_leaves_waits_for_the_outer_one_if_that_is_known(expected: bool) -> None:
    param = leaf()
    record = Record(p=param)
    queue = WeightGradientQueue(record)

    def inner() -> None:
        if expected:
            queue.expect()
        with torch.enable_grad():
            backward_with(lambda: queue.defer(param, lambda: torch.ones(2)))

    backward_with(inner, inner, lambda: record.events.append("last"))
    computed = ["computed p", "accumulated p"]
    if expected:
        assert record.events == ["deferred p", "deferred p", "last", "computed p", *computed]
    else:
        assert record.events == [*["deferred p", *computed] * 2, "last"]
    assert grad_of(param) == [2.0, 2.0]
    assert len(queue) == 0


def test_an_inner_backward_that_fails_takes_only_its_own_away_and_an_outer_one_everything() -> None:
    a, b, queue = leaf(), leaf(), WeightGradientQueue()

    def inner() -> None:
        with torch.enable_grad(), pytest.raises(ValueError, match="on purpose"):
            backward_with(lambda: queue.defer(b, lambda: torch.ones(2)), fail)

    backward_with(lambda: queue.defer(a, lambda: torch.ones(2)), inner)
    assert grad_of(a) == [1.0, 1.0]
    assert b.grad is None
    param, queue = leaf(), WeightGradientQueue()

    def inner() -> None:
        queue.expect()
        with torch.enable_grad():
            backward_with(lambda: queue.defer(param, lambda: torch.ones(2)))
        assert len(queue) == 1

    with pytest.raises(ValueError, match="on purpose"):
        backward_with(inner, fail)
    assert len(queue) == 0
    assert param.grad is None


def test_gradients_take_dtype_and_strides_of_the_parameter_and_add_to_what_is_there() -> None:
    param = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    queue = WeightGradientQueue()
    backward_with(lambda: queue.defer(param, lambda: torch.arange(6.0).view(3, 2).t()))
    assert param.grad is not None
    assert (param.grad.dtype, param.grad.stride()) == (torch.bfloat16, (3, 1))
    assert param.grad.tolist() == [[0, 2, 4], [1, 3, 5]]
    param, queue = leaf(), WeightGradientQueue()
    param.grad = before = torch.tensor([10.0, 20.0])
    backward_with(lambda: queue.defer(param, lambda: torch.tensor([1.0, 2.0])))
    assert param.grad is before
    assert before.tolist() == [11.0, 22.0]
    param, queue = leaf(), WeightGradientQueue()
    backward_with(lambda: queue.defer(param, lambda: torch.ones(2)), lambda: param.requires_grad_(False))
    assert param.grad is None


def test_what_cannot_be_the_gradient_or_is_deferred_outside_of_a_backward_is_refused() -> None:
    param, queue = leaf(), WeightGradientQueue()
    with pytest.raises(ConfigurationError, match=r"a deferred gradient has shape \(3,\) on cpu, its parameter"):
        backward_with(lambda: queue.defer(param, lambda: torch.ones(3)))
    handle = param.register_hook(lambda grad: grad[:1])
    with pytest.raises(ConfigurationError, match="a gradient hook returned a Tensor that cannot take the place"):
        backward_with(lambda: queue.defer(param, lambda: torch.ones(2)))
    handle.remove()
    param.register_post_accumulate_grad_hook(lambda param: param.grad)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigurationError, match="a post-accumulate-grad hook returned a value"):
        backward_with(lambda: queue.defer(param, lambda: torch.ones(2)))
    queue = WeightGradientQueue()
    queue.expect()
    queue.run()
    with pytest.raises(ScheduleError, match="deferred while no backward is under way"):
        queue.defer(leaf(), lambda: torch.ones(2))
    assert len(queue) == 0
