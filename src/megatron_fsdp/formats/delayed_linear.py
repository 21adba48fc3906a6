"""Linear layers whose weight gradients are computed at the end of backward.

backward of a stage   last layer: input gradient -> ... -> first layer: input gradient -> sent to the stage before
while that travels    last layer: weight gradient -> ... -> first layer: weight gradient

The function takes the weight as F.linear does, so there is an edge to the leaf. Whether its gradient waits is decided
in backward: where it cannot, it is returned as usual; where it waits, None is returned, and autograd calls the leaf's
hook as always, which then finds no gradient. Biases get their gradients as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.sharding.units import parameter_owners

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
"""Types that compute as plain tensors; DTensors and other subclasses have their own arithmetic."""


class WeightGradientQueue:
    """Queue of one model's delayed weight gradients, which its engine computes at the end of a backward."""

    def __init__(self) -> None:
        self._waiting: dict[torch.Tensor, list[_Product]] = {}

    def put(self, weight: torch.Tensor, grad: torch.Tensor, operand: torch.Tensor) -> bool:
        """Queue the product that is a weight's gradient; return False if a hook of the user needs it now.

        `grad` is that of the output, (rows, out_features), `operand` the input, (rows, in_features).
        """
        if weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) != 1:
            return False
        self._waiting.setdefault(weight, []).append(_Product(grad, operand))
        return True

    def run(self) -> None:
        """Compute all queued gradients, oldest first, into `.grad`."""
        for weight in tuple(self._waiting):
            self.accumulate(weight)

    @torch.no_grad()
    def accumulate(self, weight: torch.Tensor) -> None:
        """Compute a weight's queued gradients, and add the sum to its `.grad` as autograd does."""
        products = self._waiting.pop(weight, None)
        if products is None or not weight.requires_grad:  # frozen since forward
            return
        total = products[0].compute()
        for product in products[1:]:
            total += product.compute()
        total = total.to(weight.dtype)
        weight.grad = total if weight.grad is None else weight.grad + total

    def clear(self) -> None:
        """Drop all queued gradients, after a backward that failed."""
        self._waiting.clear()


class _Product:
    """An output gradient (rows, out_features) and an input (rows, in_features), to be multiplied as they are now."""

    def __init__(self, grad: torch.Tensor, operand: torch.Tensor) -> None:
        self._factors = (grad, operand)
        self._versions = (grad._version, operand._version)
        self._stream = _current_stream(grad)

    def compute(self) -> torch.Tensor:
        """Return the weight gradient (out_features, in_features)."""
        grad, operand = self._factors
        if self._versions != (grad._version, operand._version):
            raise ScheduleError(
                "the input or the output gradient of a linear was modified by an in-place operation while its weight "
                "gradient waited for the end of backward; do not reuse that memory, or leave delay_wgrad_compute out"
            )
        stream = _current_stream(grad)
        if stream is not None and self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            for tensor in self._factors:
                tensor.record_stream(stream)
        return grad.t().mm(operand)


def _current_stream(tensor: torch.Tensor) -> torch.Stream | None:
    return None if tensor.device.type in ("cpu", "meta") else torch.accelerator.current_stream(tensor.device)


class _DelayingLinear(torch.autograd.Function):
    """`F.linear` of operands in one dtype, whose weight gradient goes into a queue."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, queue: WeightGradientQueue
    ) -> torch.Tensor:
        ctx.queue = queue
        ctx.save_for_backward(tensor, weight if ctx.needs_input_grad[0] else None)
        return F.linear(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        tensor_grad = None if weight is None else rows.mm(weight).view(tensor.shape)
        bias_grad = rows.sum(0) if ctx.needs_input_grad[2] else None
        return tensor_grad, _weight_gradient(ctx, rows, tensor.flatten(0, -2)), bias_grad, None


# Without torch's wrapper, which looks for transforms that `_linear` rules out: a third of the cost of a call.
_apply: Any = super(torch.autograd.Function, _DelayingLinear).apply


def _weight_gradient(ctx: Any, rows: torch.Tensor, operand: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the weight; None if it was queued, or is not needed."""
    leaf = ctx.next_functions[1][0]
    while leaf.next_functions:  # behind a cast of autocast
        ((leaf, _),) = leaf.next_functions
    try:
        accumulates = torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad asks for this very gradient
        return rows.t().mm(operand)
    if not accumulates:
        return None
    differentiates = torch.is_grad_enabled()  # create_graph=True: the gradient has a graph of its own
    if not differentiates and ctx.queue.put(leaf.variable, rows, operand):
        return None
    return rows.t().mm(operand)


def _linear(
    queue: WeightGradientQueue, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute `F.linear`, whose weight gradient is queued where possible."""
    delays = (
        torch.is_grad_enabled()
        and weight.requires_grad  # it may have been frozen since
        and weight.is_leaf
        and all(type(operand) in _PLAIN for operand in (tensor, weight, bias) if operand is not None)
        and tensor.dim() > 1
        and tensor.layout is torch.strided
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )
    if not delays:
        return F.linear(tensor, weight, bias)
    kind = tensor.device.type
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensor, weight = _cast(tensor, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    found: torch.Tensor = _apply(tensor, weight, bias, queue)
    return found


def _cast(operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast an operand of a linear as autocast does: float64 stays."""
    return operand if operand.dtype is torch.float64 else operand.to(dtype)


class DelayedLinear(nn.Linear):
    """The class of an `nn.Linear` whose weight gradients are delayed; its copies are plain again."""

    _delayed: Callable[..., torch.Tensor]

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name in nn.Linear)
        """Compute the linear, with a delayed weight gradient where possible."""
        return self._delayed(input, self.weight, self.bias)

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy as a plain `nn.Linear`."""
        state = {name: value for name, value in self.__dict__.items() if name != "_delayed"}
        return nn.Linear.__new__, (nn.Linear,), state


@contextmanager
def delayed_weight_gradients(module: nn.Module) -> Iterator[WeightGradientQueue]:
    """Delay the weight gradients of linears of a model that is sharded inside of the block; undo it if that fails.

    Left alone are subclasses of `nn.Linear`, linears with a forward of their own, and weights that are frozen, no plain
    tensors (DTensors, parametrized ones), or shared with anything else (tied embeddings).

    Yields:
        Where the gradients wait.

    Raises:
        ConfigurationError: There is nothing to delay.
    """
    owners = parameter_owners(module)
    linears = [
        linear
        for linear in module.modules()
        if _is_plain(linear, "weight") and all(_is_plain(*owner) for owner in owners[id(linear.weight)])
    ]
    if not linears:
        raise ConfigurationError(
            f"delay_wgrad_compute=True has no effect on this {type(module).__name__}, which has no plain nn.Linear "
            "whose weight is its own and trained; leave it out"
        )
    queue = WeightGradientQueue()
    # Deferring is a side effect of backward, which a compiled graph cannot hold.
    linear_of_queue = torch.compiler.disable(_linear, reason="a linear with a delayed weight gradient is not compiled")
    for linear in linears:
        linear.__class__ = DelayedLinear
        linear._delayed = partial(linear_of_queue, queue)  # type: ignore[assignment]
    try:
        yield queue
    except BaseException:
        for linear in linears:
            linear.__class__ = nn.Linear
            del linear._delayed
        raise


def _is_plain(owner: nn.Module, attribute: str) -> bool:
    """Return True if a parameter is the trained, plain weight of a plain linear."""
    param = owner._parameters.get(attribute)
    is_linear = type(owner) is nn.Linear and attribute == "weight" and "forward" not in owner.__dict__
    return is_linear and type(param) in _PLAIN and param is not None and param.requires_grad
