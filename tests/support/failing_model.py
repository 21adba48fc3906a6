"""A model that raises at a chosen point of forward or backward, and an optimizer that raises half-way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tests.support.usage_models import FEATURES, Layer

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
        self.register_forward_pre_hook(lambda *_: self._pass("forward pre-hook"))
        self.register_forward_hook(lambda *_: self._pass("forward hook"))
        self.up.weight.register_hook(lambda _grad: self._pass("backward of a parameter"))

    def _pass(self, point: str) -> None:
        if self.fails_at == point:
            raise PlannedError(point)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)
        self._watch(x, "backward of the input")
        hidden = torch.tanh(self.up(x))
        self._pass("forward")
        self._watch(hidden, "backward")
        output: Tensor = x + self.down(hidden)
        self._watch(output, "backward of the output")
        return output

    def _watch(self, tensor: Tensor, point: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _grad: self._pass(point))


class FailingModel(nn.Module):
    """A layer of the root, failing units, a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList(Failing() for _ in range(LAYERS))
        self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class failing_at:  # noqa: N801 (used as a context)
    """Let one layer of a (sharded or plain) model fail inside a block."""

    def __init__(self, model: Any, position: int, point: str) -> None:
        self._layer = model.layers[position]
        self._point = point
        self._handle: Any = None

    def __enter__(self) -> None:
        self._layer.fails_at = self._point
        if self._point == "earlier forward pre-hook":
            # Registered now, and before all that are there.
            self._handle = self._layer.register_forward_pre_hook(
                lambda *_: self._layer._pass(self._point), prepend=True
            )

    def __exit__(self, *_: object) -> None:
        self._layer.fails_at = None
        if self._handle is not None:
            self._handle.remove()


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
