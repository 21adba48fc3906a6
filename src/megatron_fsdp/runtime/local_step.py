"""Let torch's elementwise optimizers step on plain local tensors, without a detour through DTensor for each operation.

During `step` the code of the optimizer's class works on a stand-in: an object of the same kind that shares every
attribute with the optimizer but shows this rank's shards as parameters, their gradients and their state. The optimizer
itself, which hooks, closures, schedulers and checkpoints hold, has its DTensors throughout, so there is nothing to
restore, whatever happens inside. (Hooks get the stand-in as `args[0]`; one that returns the optimizer there instead
has that step run on DTensors.)

    optimizer.param_groups[i]["params"][j]   a DTensor      stand-in: a plain tensor over the same memory
    optimizer.state[param]["exp_avg"]        a DTensor      stand-in: its local tensor; new ones are wrapped at once
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor

_SLOTS: dict[type[Optimizer], frozenset[str]] = {
    torch.optim.ASGD: frozenset({"ax"}),
    torch.optim.Adadelta: frozenset({"square_avg", "acc_delta"}),
    torch.optim.Adagrad: frozenset({"sum"}),
    torch.optim.Adam: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    torch.optim.AdamW: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    torch.optim.Adamax: frozenset({"exp_avg", "exp_inf"}),
    torch.optim.NAdam: frozenset({"exp_avg", "exp_avg_sq"}),
    torch.optim.RAdam: frozenset({"exp_avg", "exp_avg_sq"}),
    torch.optim.RMSprop: frozenset({"square_avg", "momentum_buffer", "grad_avg"}),
    torch.optim.SGD: frozenset({"momentum_buffer"}),
}
"""Optimizers that compute each element from its own gradient and state alone, with the state that is cut as its
parameter; all other state is numbers. These exact classes: a subclass may do anything."""


def steps_locally(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of a kind whose step needs no DTensors."""
    return type(optimizer) in _SLOTS


class LocalStep:
    """Makes stand-ins for one optimizer, and keeps its local parameters from step to step.

    Between steps it holds neither gradients nor state, whose memory others may want to give back.
    """

    def __init__(self) -> None:
        self._groups: list[_LocalGroup] = []

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        """What to step in place of a connected optimizer; call `release` after the step.

        Returns:
            A stand-in that works on local tensors; the optimizer itself where its kind is not known to be elementwise,
            or where the step is compiled or runs in inference mode.
        """
        slots = _SLOTS.get(type(optimizer))
        if slots is None or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return optimizer
        kind = _stand_in_kind(type(optimizer))  # type: ignore[arg-type]  # mypy: classes with a __hash__
        made: Optimizer = kind.__new__(kind)
        made.__dict__ = optimizer.__dict__  # one dict: the step may read and note whatever it likes
        made._view = _View(optimizer, slots, self)  # type: ignore[attr-defined]
        return made

    def release(self) -> None:
        """The step is over; let go of gradients and state."""
        for group in self._groups:
            group.release()

    def localise(self, optimizer: Optimizer, slots: frozenset[str]) -> tuple[list[dict[str, Any]], _LocalStates] | None:
        """Parameters with their gradients, and their state, as local tensors of now.

        None where anything in them is not cut as its parameter, or where the step is to be differentiated: DTensors
        then take care of it, or say what is wrong.
        """
        known, self._groups = self._groups, []
        states = _LocalStates(optimizer.state)
        shown: list[dict[str, Any]] = []
        for group, last in itertools.zip_longest(optimizer.param_groups, known[: len(optimizer.param_groups)]):
            params = group["params"]
            if group.get("differentiable") or not set(map(type, params)) <= {UnevenDTensor}:
                return None
            local = last if last is not None and last.is_of(params) else _LocalGroup(params)
            self._groups.append(local)
            if not local.show_gradients() or not local.show_state(optimizer.state, slots):
                return None
            states.update(local.states)
            shown.append({**group, "params": local.params})
        return shown, states


class _LocalGroup:
    """The local tensors of a parameter group, over the memory of the shards.

    Attributes:
        params: This rank's elements of each parameter. Writes into them count in the versions of the shards: a detached
            tensor shares the counter.
        states: State by local parameter.
    """

    def __init__(self, shown: Sequence[UnevenDTensor]) -> None:
        self._shown = tuple(shown)
        self._sources = tuple(map(_local_tensor, shown))
        self.params = [source.detach() for source in self._sources]
        self.states = {local: _LocalState(param) for local, param in zip(self.params, self._shown, strict=True)}

    def is_of(self, params: Sequence[UnevenDTensor]) -> bool:
        """Whether these are the parameters, over the same memory."""
        return (
            len(params) == len(self._shown)
            and all(map(is_, params, self._shown))
            and all(map(is_, map(_local_tensor, params), self._sources))
        )

    def show_gradients(self) -> bool:
        """Take over the gradients that there are now; False where one is not cut as its parameter, or of its dtype."""
        for local, param in zip(self.params, self._shown, strict=True):
            grad = param.grad
            if grad is not None and not (_is_cut_as(param.shard_frame, grad) and grad.dtype == param.dtype):
                return False
            local.grad = None if grad is None else grad._local_tensor  # type: ignore[attr-defined]
        return True

    def show_state(self, source: Mapping[torch.Tensor, dict[str, Any]], slots: frozenset[str]) -> bool:
        """Take over the state that there is now; False where it is not cut as its parameter."""
        return all(
            state.show(source.get(param), slots) for state, param in zip(self.states.values(), self._shown, strict=True)
        )

    def release(self) -> None:
        """Hold neither gradients nor state."""
        for local, state in self.states.items():
            local.grad = None
            state.release()


class _LocalStates(dict[torch.Tensor, "_LocalState"]):
    """The state of all parameters, by local parameter; there is always one, as in torch's."""

    def __init__(self, source: dict[torch.Tensor, dict[str, Any]]) -> None:
        self._source = source

    def __getitem__(self, local: torch.Tensor) -> _LocalState:
        found = super().__getitem__(local)
        if found.own is None:
            found.own = self._source[found.param]
        return found


class _LocalState(dict[str, Any]):
    """The state of one parameter; what is set here is set in the optimizer's own state at once.

    Attributes:
        param: The parameter, a DTensor.
        own: Its state in the optimizer; None where it has none yet, and between steps.
    """

    __slots__ = ("_slots", "own", "param")

    def __init__(self, param: UnevenDTensor) -> None:
        self.param = param
        self.own: dict[str, Any] | None = None
        self._slots: frozenset[str] = frozenset()

    def show(self, own: dict[str, Any] | None, slots: frozenset[str]) -> bool:
        """Show what there is; False where it is not cut as the parameter."""
        self.clear()
        self.own, self._slots = own, slots
        if own:
            frame = self.param.shard_frame
            for key, value in own.items():
                if value is None or key not in slots:
                    dict.__setitem__(self, key, value)
                elif _is_cut_as(frame, value):
                    dict.__setitem__(self, key, value._local_tensor)
                else:
                    return False
        return True

    def release(self) -> None:
        """Show nothing."""
        self.clear()
        self.own = None

    def __setitem__(self, key: str, value: Any) -> None:
        assert self.own is not None
        if key in self and value is self[key]:
            return
        super().__setitem__(key, value)
        is_cut = key in self._slots and value is not None
        self.own[key] = UnevenDTensor.wrap(value, self.param.shard_frame) if is_cut else value


def _is_cut_as(frame: ShardFrame, value: object) -> bool:
    return type(value) is UnevenDTensor and (value.shard_frame is frame or value.shard_frame == frame)


_local_tensor = attrgetter("_local_tensor")


# ---- the stand-in ----------------------------------------------------------------------------------------------------


@functools.cache
def _stand_in_kind(kind: type[Optimizer]) -> type[Optimizer]:
    """The class of stand-ins for a class of optimizers, under its name, which torch's messages mention."""
    return type(kind.__name__, (_StandIn, kind), {"__slots__": ()})


class _StandIn(Optimizer):
    """Parameters and state of an optimizer as local tensors; everything else is the optimizer's own."""

    __slots__ = ("_view",)
    _view: _View

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, as of now: a closure has changed gradients by the time that torch looks at them."""
        return self._view.look()

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """State by parameter, those of the last look at `param_groups`."""
        return self._view.state


class _View:
    """What a stand-in shows."""

    def __init__(self, optimizer: Optimizer, slots: frozenset[str], step: LocalStep) -> None:
        self._optimizer = optimizer
        self._slots = slots
        self._step = step
        self.state: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state

    def look(self) -> list[dict[str, Any]]:
        """The groups of now, with local parameters where that is possible."""
        found = self._step.localise(self._optimizer, self._slots)
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        groups, self.state = (groups, self._optimizer.state) if found is None else found
        return groups
