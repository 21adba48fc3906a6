"""Linear layers whose weight gradients wait in a queue until backward has done everything else.

    backward of a stage   last layer: input gradient -> ... -> first layer: input gradient -> sent to the stage before
    while that travels    last layer: weight gradient -> ... -> first layer: weight gradient

Autograd calls the hooks of a leaf even where a function returns None for it. So the function takes its weights
detached, and the queue does what autograd would do at the leaf. In their place stands an empty tensor that requires a
gradient: it makes the output require one, and says whether this backward accumulates into `.grad` at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from megatron_fsdp.engine.weight_gradient_queue import WeightGradientQueue
from megatron_fsdp.errors import ConfigurationError, ScheduleError

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
"""Types that compute as plain tensors; DTensors and other subclasses have their own arithmetic."""


def delayed_linear(
    tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, queue: WeightGradientQueue
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`; weight and bias get their gradients from the queue.

    Where there is nothing to delay, or the gradients are not those of plain leaves (DTensors and other subclasses,
    weights that were computed), it is that function.

    Args:
        tensor: The input, `(..., in_features)`, with one dimension or more.
        weight: `(out_features, in_features)`.
        bias: `(out_features,)`, or None.
        queue: Where the gradients wait.

    Raises:
        ScheduleError: Its backward is asked for a graph of its own (create_graph=True), or finds that its input or
            output gradient was changed in place while the weight gradient waited.
    """
    weights = [weight] if bias is None else [weight, bias]
    learning = torch.is_grad_enabled() and any(operand.requires_grad for operand in weights)
    plain = all(type(operand) in _PLAIN and operand.layout is torch.strided for operand in (tensor, *weights))
    if not (learning and plain and all(operand.is_leaf for operand in weights)):
        return F.linear(tensor, weight, bias)
    queue.expect()
    leaves = _Leaves(weight, bias if bias is not None and bias.requires_grad else None, queue)
    anchor = torch.empty(0, device=tensor.device, requires_grad=True)
    detached = (weight.detach(), None if bias is None else bias.detach())
    return _DelayedLinear.apply(tensor, anchor, *detached, leaves)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Leaves:
    """The parameters that get the gradients, and the queue; no bias where it took none in forward."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    queue: WeightGradientQueue


class _DelayedLinear(torch.autograd.Function):
    """A linear whose backward returns the input gradient, and defers the others."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        _anchor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        leaves: _Leaves,
    ) -> torch.Tensor:
        dtype = _autocast_dtype(tensor.device.type)
        operand = _autocast(tensor, dtype)
        ctx.leaves, ctx.compute_dtype, ctx.input_dtype = leaves, dtype, tensor.dtype
        ctx.save_for_backward(
            operand if leaves.weight.requires_grad else None,
            weight if ctx.needs_input_grad[0] else None,
        )
        # Cast here: autocast itself would cache casts without a graph, and reuse them where one is needed.
        return F.linear(operand, _autocast(weight, dtype), None if bias is None else _autocast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (grad,) = grads
        if torch.is_grad_enabled():
            raise ScheduleError(
                "a linear whose weight gradient is delayed was differentiated with create_graph=True, which needs that "
                "gradient in the graph; call undelay_weight_gradients(model) before differentiating twice"
            )
        operand, weight = ctx.saved_tensors
        # Gradients of given inputs only (torch.autograd.grad) leave `.grad` alone.
        if torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
            _defer(ctx.leaves, operand, grad)
        if weight is None:
            return None, None, None, None, None
        with _no_autocast(grad.device.type):
            rows = _rows(grad).mm(_autocast(weight, ctx.compute_dtype))
        return rows.view(*grad.shape[:-1], weight.shape[1]).to(ctx.input_dtype), None, None, None, None


def _defer(leaves: _Leaves, operand: torch.Tensor | None, grad: torch.Tensor) -> None:
    if operand is not None:
        leaves.queue.defer(leaves.weight, _Waiting(_weight_gradient, grad, operand))
    if leaves.bias is not None:
        leaves.queue.defer(leaves.bias, _Waiting(_bias_gradient, grad))


class _Waiting:
    """A computation on tensors that must stay as they are until it is called."""

    def __init__(self, function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> None:
        self._function, self._operands = function, operands
        self._versions = [tensor._version for tensor in operands]
        self._stream = _current_stream(operands[0])

    def __call__(self) -> torch.Tensor:
        if self._versions != [tensor._version for tensor in self._operands]:
            raise ScheduleError(
                "the input or the output gradient of a linear was modified by an in-place operation while its weight "
                "gradient waited for the end of backward; do not reuse that memory, or do not delay this linear"
            )
        stream = _current_stream(self._operands[0])
        if stream is not None and self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            for tensor in self._operands:
                tensor.record_stream(stream)
        with _no_autocast(self._operands[0].device.type):
            return self._function(*self._operands)


def _weight_gradient(grad: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    return _rows(grad).t().mm(_rows(operand))


def _bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    return _rows(grad).sum(0)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten all dimensions but the last."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def _current_stream(tensor: torch.Tensor) -> torch.Stream | None:
    return None if tensor.device.type in ("cpu", "meta") else torch.accelerator.current_stream(tensor.device)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast would compute in; None where it is off."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast an operand of a linear as autocast does: float64 and integers stay."""
    stays = dtype is None or not tensor.is_floating_point() or tensor.dtype is torch.float64
    return tensor if stays else tensor.to(dtype)


@contextlib.contextmanager
def _no_autocast(device_type: str) -> Iterator[None]:
    if _autocast_dtype(device_type) is None:
        yield
    else:
        with torch.autocast(device_type, enabled=False):
            yield


class DelayedLinear(nn.Linear):
    """The class of an `nn.Linear` while its weight gradients are delayed; its copies and pickles are plain again."""

    _delayed_queue: WeightGradientQueue
    _delayed_function: Callable[..., torch.Tensor]  # kept from the compiler

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name in nn.Linear)
        """Compute the linear, with delayed weight gradients."""
        return self._delayed_function(input, self.weight, self.bias, self._delayed_queue)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy as a plain `nn.Linear`."""
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("_delayed_")}
        return _blank_linear, (), state


def _blank_linear() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


def delay_weight_gradients(module: nn.Module, queue: WeightGradientQueue) -> list[str]:
    """Delay the weight gradients of every `nn.Linear` of a model, in place; names and state dict stay.

    Left alone are subclasses of `nn.Linear`, linears with a forward of their own or with parameters that are not plain
    (DTensors), and linears that share a parameter with a module that is left alone (tied embeddings): one part of its
    gradient would come before the other. Call this before the model is sharded.

    Args:
        module: A model, or one linear.
        queue: Where the gradients wait; one queue for a model.

    Returns:
        The names of the linears that are delayed, in the order of `named_modules`; "" is `module` itself.

    Raises:
        ConfigurationError: A linear delays into another queue already.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, DelayedLinear) and inner._delayed_queue is not queue:
            raise ConfigurationError(
                f"the weight gradient of {name or 'the module'} is delayed in another queue already; use one queue, or "
                "call undelay_weight_gradients first"
            )
    chosen = _delayable(module)
    # Deferring is a side effect of backward, which a compiled graph cannot hold.
    function = torch.compiler.disable(delayed_linear, reason="a linear with a delayed weight gradient is not compiled")
    for linear in chosen.values():
        linear.__class__ = DelayedLinear
        linear._delayed_queue = queue  # type: ignore[assignment]
        linear._delayed_function = function
    return list(chosen)


def delay_all(module: nn.Module) -> WeightGradientQueue:
    """Delay all weight gradients that can be delayed, for `delay_wgrad_compute`; return the queue.

    Raises:
        ConfigurationError: There is nothing to delay.
    """
    queue = WeightGradientQueue()
    if not delay_weight_gradients(module, queue):
        raise ConfigurationError(
            f"delay_wgrad_compute=True has no effect on this {type(module).__name__}, which has no plain nn.Linear "
            "whose parameters are its own; leave it out"
        )
    return queue


def undelay_weight_gradients(module: nn.Module) -> list[str]:
    """Undo `delay_weight_gradients`; return the names of the linears that were delayed."""
    chosen = {name: inner for name, inner in module.named_modules() if isinstance(inner, DelayedLinear)}
    for linear in chosen.values():
        linear.__class__ = nn.Linear  # type: ignore[assignment]
        del linear.__dict__["_delayed_queue"], linear.__dict__["_delayed_function"]
    return list(chosen)


def _delayable(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears that can be delayed, by name: without those that share a parameter with anything else."""
    linears = ((name, inner) for name, inner in module.named_modules() if isinstance(inner, nn.Linear))
    chosen = {name: linear for name, linear in linears if _is_plain(linear)}
    while True:
        ids = {id(linear) for linear in chosen.values()}
        others = {
            id(param) for inner in module.modules() if id(inner) not in ids for param in inner.parameters(recurse=False)
        }
        kept = {
            name: linear
            for name, linear in chosen.items()
            if not any(id(param) in others for param in linear.parameters(recurse=False))
        }
        if len(kept) == len(chosen):
            return kept
        chosen = kept


def _is_plain(linear: nn.Linear) -> bool:
    if type(linear) not in (nn.Linear, DelayedLinear) or "forward" in linear.__dict__:
        return False
    params = list(linear.parameters(recurse=False))
    learns = any(param.requires_grad for param in params)
    return "weight" in linear._parameters and learns and all(type(param) in _PLAIN for param in params)
