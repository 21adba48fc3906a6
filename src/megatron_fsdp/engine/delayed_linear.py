"""Weight gradients of linear layers that wait in a queue until backward has done everything else.

backward of a stage   last layer: input gradient -> ... -> first layer: input gradient -> sent to the stage before
while that travels    last layer: weight gradient -> ... -> first layer: weight gradient
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from megatron_fsdp.errors import ConfigurationError, ScheduleError

# ---- the queue -------------------------------------------------------------------------------------------------------
#
# A backward is identified by the number of its graph task. Reentrant recomputation starts a task inside of a task; the
# inner one's deferred gradients wait for the outer one, provided that the queue knows that (`expect`). Autograd drops
# its callbacks together with a task that failed. So each task gets a callback object that only autograd refers to, and
# when that dies without having been called, the gradients that its task deferred are dropped at once.

Event = Literal["deferred", "computed", "accumulated"]
Listener = Callable[[Event, torch.Tensor], None]


@dataclass
class _Deferred:
    param: torch.Tensor
    compute: Callable[[], torch.Tensor]
    task: int


class _EndOfTask:
    """A callback that reports the end of a graph task. Only autograd refers to it: it dies when the task fails."""

    def __init__(self, queue: WeightGradientQueue, task: int) -> None:
        self._queue, self._task = queue, task

    def __call__(self) -> None:
        self._queue._task_ends(self._task)


class WeightGradientQueue:
    """Weight gradients that wait for the end of backward. A queue serves one backward at a time.

    A plain `loss.backward()` is complete when it returns: the first deferral of a backward queues `run` as a callback
    of autograd. Code that needs the gradients earlier, such as an engine whose own callback was queued before, calls
    `run` itself; the queue's callback then finds nothing.

    Args:
        listener: Called with "deferred", "computed" or "accumulated" and the parameter, in the order of events.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._waiting: deque[_Deferred] = deque()
        # Running tasks, outermost first. The references die with tasks that fail.
        self._tasks: dict[int, weakref.ref[_EndOfTask]] = {}

    def __len__(self) -> int:
        """Count the gradients that wait."""
        return len(self._waiting)

    def expect(self) -> None:
        """Register the running backward, if any, so that what reentrant backwards inside of it defer waits for its end.

        Called by layers in forward: a forward inside of a backward is a recomputation.
        """
        if torch._C._current_graph_task_id() != -1:
            self._know_task()

    def defer(self, param: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        """Put the computation of a gradient at the end of the queue.

        Args:
            param: A leaf tensor.
            compute: Returns its gradient: a tensor that nobody else holds, of the parameter's shape and device, in any
                floating-point dtype. What it refers to stays in memory until then.

        Raises:
            ScheduleError: No backward is running.
        """
        if torch._C._current_graph_task_id() == -1:
            raise ScheduleError(
                "a weight gradient was deferred while no backward is under way, so that nobody would compute it; call "
                "defer from the backward of an autograd function"
            )
        self._waiting.append(_Deferred(param, compute, self._know_task()))
        self._tell("deferred", param)

    @property
    def params(self) -> set[int]:
        """Ids of the parameters whose gradients wait."""
        return {id(deferred.param) for deferred in self._waiting}

    def run(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Compute the waiting gradients, oldest first, and accumulate them as autograd would.

        Args:
            params: Only the gradients of these; None: all.

        A parameter's gradients of one backward are summed first. With the last of them its `register_hook` hooks are
        called with the sum, its `.grad` is set or added to in place, and its post-accumulate-grad hooks are called, all
        once. After an exception the queue is empty.
        """
        waiting, self._waiting = self._waiting, deque()
        if params is not None:
            wanted = set(map(id, params))
            self._waiting = deque(deferred for deferred in waiting if id(deferred.param) not in wanted)
            waiting = deque(deferred for deferred in waiting if id(deferred.param) in wanted)
        to_come = Counter(id(deferred.param) for deferred in waiting)
        sums: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            while waiting:
                deferred = waiting.popleft()  # so that its activations are freed right after it
                key = id(deferred.param)
                grad = deferred.compute()
                self._tell("computed", deferred.param)
                sums[key] = sums[key] + grad if key in sums else grad
                to_come[key] -= 1
                if not to_come[key]:
                    _accumulate(deferred.param, sums.pop(key))
                    self._tell("accumulated", deferred.param)

    def clear(self) -> None:
        """Drop all waiting gradients, and their backward."""
        self._waiting.clear()
        self._tasks.clear()

    def _know_task(self) -> int:
        """Return the number of the running graph task; its end is watched from the first call on."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            end = _EndOfTask(self, task)
            self._tasks[task] = weakref.ref(end, partial(_task_is_gone, weakref.ref(self), task))
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return task

    def _task_ends(self, task: int) -> None:
        if self._tasks.pop(task, None) is None:
            return  # cleared since
        if not self._tasks:
            self.run()
            return
        outer = next(reversed(self._tasks))
        for deferred in self._waiting:
            if deferred.task == task:
                deferred.task = outer

    def _task_fails(self, task: int) -> None:
        if self._tasks.pop(task, None) is not None:
            self._waiting = deque(deferred for deferred in self._waiting if deferred.task != task)

    def _tell(self, event: Event, param: torch.Tensor) -> None:
        if self._listener is not None:
            self._listener(event, param)


def _task_is_gone(reference: weakref.ref[WeightGradientQueue], task: int, _end: object) -> None:
    queue = reference()
    if queue is not None:
        queue._task_fails(task)


def _accumulate(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Do what autograd does at a leaf: cast, hooks, `.grad`, hooks."""
    if not param.requires_grad:
        return  # frozen since forward
    if grad.shape != param.shape or grad.device != param.device:
        raise ConfigurationError(
            f"a deferred gradient has shape {tuple(grad.shape)} on {grad.device}, its parameter {tuple(param.shape)} "
            f"on {param.device}; let compute return a gradient of the parameter's shape and device"
        )
    dtype = getattr(param, "grad_dtype", param.dtype)  # None where a gradient may have any
    grad = grad if dtype is None else grad.to(dtype)
    for hook in list((param._backward_hooks or {}).values()):
        grad = _replaced(grad, hook(grad))
    if param.grad is not None:
        param.grad.add_(grad)
    elif grad.stride() == param.stride():
        param.grad = grad
    else:
        param.grad = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        if hook(param) is not None:
            raise ConfigurationError(
                "a post-accumulate-grad hook returned a value, which would be lost; change the gradient in place and "
                "return None"
            )


def _replaced(grad: torch.Tensor, answer: object) -> torch.Tensor:
    """Return the gradient after a hook: what it returned, if anything."""
    if answer is None:
        return grad
    if not isinstance(answer, torch.Tensor) or (answer.shape, answer.dtype) != (grad.shape, grad.dtype):
        raise ConfigurationError(
            f"a gradient hook returned a {type(answer).__name__} that cannot take the place of a gradient of shape "
            f"{tuple(grad.shape)} and {grad.dtype}; return None or a tensor of the same shape and dtype"
        )
    return answer


# ---- a linear --------------------------------------------------------------------------------------------------------
#
# Autograd calls the hooks of a leaf even where a function returns None for it. So the function takes its weights
# detached, and the queue does what autograd would do at the leaf. In their place stands an empty tensor that requires a
# gradient: it makes the output require one, and says whether this backward accumulates into `.grad` at all.

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


# ---- modules ---------------------------------------------------------------------------------------------------------


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
