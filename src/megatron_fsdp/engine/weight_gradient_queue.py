"""A queue of weight gradients that are computed when backward has done everything else.

A backward is identified by the number of its graph task. Reentrant recomputation starts a task inside of a task; the
inner one's deferred gradients wait for the outer one, provided that the queue knows that (`expect`). Autograd drops
its callbacks together with a task that failed. So each task gets a callback object that only autograd refers to, and
when that dies without having been called, the gradients that its task deferred are dropped at once.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from megatron_fsdp.errors import ConfigurationError, ScheduleError

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
