"""What a forward and backward keep alive and compute, found out by running them once without memory.

Tensors on the meta device have shapes and storages of a size, but no bytes. Autograd saves, frees and accumulates them
as it does real ones, so following storages through one step on the meta device gives the activation memory of a real
step; only what kernels allocate inside themselves and give back is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.engine.hooks import tensors_in
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.answers import Answers
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Segment
from megatron_fsdp.plan.experts_stand_in import balanced_experts
from megatron_fsdp.plan.flops import operator_bytes, operator_flops
from megatron_fsdp.plan.kernels import Kernels, kernels_of
from megatron_fsdp.plan.live_storages import LiveStorages, tensors_of
from megatron_fsdp.plan.recompute import Recompute, recomputing

ROOT = 0


def profile_compute(
    model: nn.Module,
    inputs: Any,
    *,
    unit_names: Sequence[str],
    loss_fn: Callable[[Any], Tensor] | None = None,
    kernels: Kernels = "cuda",
    recompute: Recompute = "none",
    expert_ranks: int = 1,
) -> ComputeProfile:
    """Run forward, loss and backward once and write down what is alive and what is computed between the units' events.

    The step is ``loss_fn(model(inputs)).backward()``: nobody holds the model's output while backward runs. A gradient
    of a parameter dies as soon as it is complete, as the engine copies it into a bucket and drops it.

    Args:
        model: On the meta device, where nothing is allocated; other devices work and cost what they cost. Its
            parameters have no gradients.
        inputs: On the model's device: a mapping (keyword arguments), a tuple (positional ones) or one tensor.
        unit_names: Name of each unit's module, in the order of units; the first is "", the root.
        loss_fn: Scalar loss of the model's output; None: the output's `loss`, or the output itself.
        kernels: Whose kernels to assume for attention, dropout and norms; see `kernels_of`. It is what makes
            attention keep queries, keys, values, results and one number per row ("cuda", "cpu"), or all scores
            ("math").
        recompute: What runs again in backward instead of being kept; see `recomputing`.
        expert_ranks: How many ranks share the experts of a layer; see `balanced_experts`.

    Returns:
        The profile; sizes in bytes.

    Raises:
        ConfigurationError: There is no scalar loss, a parameter has a gradient, shapes depend on values, or there is
            nothing to recompute or to share.
    """
    recorder = _Recorder()
    with balanced_experts(model, expert_ranks), recomputing(model, unit_names, recompute):
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _hooked(recorder, model, unit_names),
            kernels_of(kernels),
            recorder,
        ):
            loss = _loss(_call(model, inputs), loss_fn)
            loss.backward()
        recorder.mark(Event.BACKWARD_ENDS, ROOT)
    return ComputeProfile(tuple(unit_names), recorder.finish(), _bytes_of(inputs))


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _loss(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    loss = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigurationError(
            f"the profile needs a scalar loss with a gradient and got {found} from "
            f"{'loss_fn' if loss_fn is not None else 'the model'}; give a loss_fn, or labels to a model that has a loss"
        )
    return loss


def _bytes_of(inputs: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_in(inputs)}
    return sum(storages.values())


@dataclass
class _Open:
    """The segment under way."""

    event: Event
    unit: int
    computing: int
    begin_bytes: int
    peak_bytes: int
    flops: int = 0
    recomputed_flops: int = 0
    moved_bytes: int = 0
    operators: int = 0
    gradients: list[str] = field(default_factory=list)
    gradient_peak_bytes: int = 0

    def close(self, end_bytes: int) -> Segment:
        values = {**self.__dict__, "gradients": tuple(self.gradients)}
        return Segment(end_bytes=end_bytes, **values)


class _Recorder(TorchDispatchMode):
    """Sees every operator, and is told of every event."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.in_backward = False
        self._live = LiveStorages()
        self._answers = Answers()
        self._forwards: list[int] = []
        self._backward_of = ROOT
        self._done: list[Segment] = []
        self._open = _Open(Event.STEP_BEGINS, ROOT, ROOT, 0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._answers.run(func, args, kwargs)
        operands = [*tensors_of(args), *tensors_of(tuple(kwargs.values()))]
        self._live.note(operands, tensors_of((result,)))
        segment = self._open
        segment.peak_bytes = max(segment.peak_bytes, self._live.now_bytes)
        moved = operator_bytes(func, args, kwargs, result)
        flops = operator_flops(func, args, kwargs, result)
        segment.moved_bytes += moved
        segment.operators += moved > 0
        segment.flops += flops
        if self.in_backward and torch.is_grad_enabled():  # backward itself computes without a graph
            segment.recomputed_flops += flops
        return result

    def mark(self, event: Event, unit: int) -> None:
        """An event ends the segment under way and begins the next."""
        if event is Event.FORWARD_BEGINS:
            self._forwards.append(unit)
        elif event is Event.FORWARD_ENDS:
            self._forwards.pop()
            if self.in_backward:
                self._backward_of = unit  # what was recomputed last is what backward comes to next
        elif event is Event.BACKWARD_BEGINS:
            self.in_backward = True
            self._backward_of = unit or self._backward_of  # a unit may share its output with the root around it
        elif event is Event.BACKWARD_ENDS:
            self.in_backward = False
        now = self._live.now_bytes
        self._done.append(self._open.close(now))
        computing = self._forwards[-1] if self._forwards else self._backward_of if self.in_backward else ROOT
        self._open = _Open(event, unit, computing, now, now)

    def gradient(self, name: str) -> None:
        """The gradient of a parameter is complete, and alive."""
        self._open.gradients.append(name)
        self._open.gradient_peak_bytes = max(self._open.gradient_peak_bytes, self._live.now_bytes)

    def finish(self) -> tuple[Segment, ...]:
        """All segments; the first only where something was computed in it."""
        segments = [*self._done, self._open.close(self._live.now_bytes)]
        return tuple(segments if segments[0].operators else segments[1:])


@contextmanager
def _hooked(recorder: _Recorder, model: nn.Module, unit_names: Sequence[str]) -> Iterator[None]:
    """Hooks at the places where the engine has its own."""
    handles: list[RemovableHandle] = []
    for unit, name in enumerate(unit_names):
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(_before_forward, recorder, unit), prepend=True))
        handles.append(module.register_forward_hook(partial(_after_forward, recorder, unit), always_call=True))
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ConfigurationError(f"{name} has a gradient already; profile a model before its first backward")
        if param.requires_grad:
            handles.append(param.register_post_accumulate_grad_hook(partial(_take_gradient, recorder, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before_forward(recorder: _Recorder, unit: int, _module: nn.Module, _args: Any) -> None:
    recorder.mark(Event.FORWARD_BEGINS, unit)


def _after_forward(recorder: _Recorder, unit: int, _module: nn.Module, _args: Any, output: Any) -> None:
    recorder.mark(Event.FORWARD_ENDS, unit)
    if torch.is_grad_enabled():
        announce = _Once(recorder, unit)
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(announce)


class _Once:
    """Marks the backward of one forward, when the first gradient of its outputs is known."""

    def __init__(self, recorder: _Recorder, unit: int) -> None:
        self._recorder, self._unit, self._done = recorder, unit, False

    def __call__(self, _grad: Tensor) -> None:
        if not self._done:
            self._done = True
            self._recorder.mark(Event.BACKWARD_BEGINS, self._unit)


def _take_gradient(recorder: _Recorder, name: str, param: Tensor) -> None:
    recorder.gradient(name)
    param.grad = None
