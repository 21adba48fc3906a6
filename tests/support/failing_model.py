"""A model that raises at a chosen point of forward or backward, and an optimizer that raises half-way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tests.support.usage_models import Layer, Ordered

LAYERS = 3
POINTS = (
    "earlier forward pre-hook",  # runs before anything of the unit
    "forward pre-hook",
    "forward",
    "forward hook",
    "backward of the output",  # the first that backward meets of the unit
    "backward",
    "backward of a parameter",
    "backward of the input",  # the last
)


class PlannedError(Exception):
    """The failure that was asked for."""


class Failing(Layer):
    """A unit that raises at the point that `fails_at` names."""

    fails_at: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda *_: self.fail("forward pre-hook"))
        self.register_forward_hook(lambda *_: self.fail("forward hook"))
        self.up.weight.register_hook(lambda _grad: self.fail("backward of a parameter"))

    def fail(self, point: str) -> None:
        """Raise where this is the point."""
        if self.fails_at == point:
            raise PlannedError(point)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)
        self._watch(x, "backward of the input")
        hidden = torch.tanh(self.up(x))
        self.fail("forward")
        self._watch(hidden, "backward")
        output: Tensor = x + self.down(hidden)
        self._watch(output, "backward of the output")
        return output

    def _watch(self, tensor: Tensor, point: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _grad: self.fail(point))


class FailingModel(Ordered):
    """Failing units between layers of the root."""

    def __init__(self) -> None:
        super().__init__((0, 1, 2), LAYERS, Failing)


@contextmanager
def failing_at(model: Any, position: int, point: str) -> Iterator[None]:
    """Let one layer of a (sharded or plain) model fail inside a block."""
    layer = model.layers[position]
    layer.fails_at = point
    handle: Any = None
    if point == "earlier forward pre-hook":  # registered now, and before all that are there
        handle = layer.register_forward_pre_hook(lambda *_: layer.fail(point), prepend=True)
    try:
        yield
    finally:
        layer.fails_at = None
        if handle is not None:
            handle.remove()


class HalfwaySGD(Optimizer):
    """Gradient descent that raises after a number of parameters where it is told to."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.fails_after: int | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update one parameter after another."""
        for group in self.param_groups:
            for position, param in enumerate(group["params"]):
                if position == self.fails_after:
                    raise PlannedError("step")
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
