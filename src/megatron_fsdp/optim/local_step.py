"""Step torch's elementwise optimizers on local tensors, without the dispatch of each operation through DTensor.

During `step` the code of the optimizer's class works on a view: an object of the same kind that shares every
attribute with the optimizer but shows this rank's shards as plain tensors, with their gradients and state. The
optimizer itself, which hooks, closures, schedulers and checkpoints hold, has its DTensors throughout, so there is
nothing to restore, whatever happens inside. (Hooks get the view as `args[0]`; one that returns the optimizer there
instead has that step run on DTensors.)

    optimizer.param_groups[i]["params"][j]   a DTensor      view: a plain tensor over the same memory
    optimizer.state[param]["exp_avg"]        a DTensor      view: a plain tensor over the same memory
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_fsdp.comm.lanes import finish_stream
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.gradients import GRAD, get_grads
from megatron_fsdp.engine.memory import StateMemory
from megatron_fsdp.errors import ConfigurationError

_SHARDED_STATE: dict[type[Optimizer], frozenset[str]] = {
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
"""Optimizers that compute each element from its own gradient and state alone, with the state that is sharded as its
parameter; all other state is numbers. These exact classes: a subclass may do anything."""

State = dict[str, Any]


def steps_locally(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of this kind can step on local tensors."""
    return type(optimizer) in _SHARDED_STATE


def sharded_state(optimizer: Optimizer) -> frozenset[str]:
    """Return the keys of the state that is sharded as its parameter; none where the kind of optimizer is not known."""
    return _SHARDED_STATE.get(type(optimizer), frozenset())


class LocalStep:
    """The view of one optimizer; between steps it holds neither gradients nor state.

    Args:
        moves_state: Whether state of some parameters rests elsewhere than on the device.
    """

    def __init__(self, moves_state: bool = False) -> None:
        self._moves_state = moves_state
        self._view: _LocalTensors | None = None  # of the running step

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        """Return the object to step in place of a connected optimizer; call `finish` after the step.

        Returns:
            A view that works on local tensors; the optimizer itself where its kind is not known to be elementwise,
            or where the step is compiled or runs in inference mode.
        """
        self.hand_over()
        if not steps_locally(optimizer) or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return optimizer
        kind = _view_class(type(optimizer))  # type: ignore[arg-type]  # mypy: classes with a __hash__
        made: Optimizer = kind.__new__(kind)
        made.__dict__ = optimizer.__dict__  # one dict: the step may read and write any attribute
        self._view = made._view = _LocalTensors(optimizer, self._moves_state)  # type: ignore[attr-defined]
        return made

    def finish(self, _optimizer: Optimizer) -> None:
        """Give new state to the optimizer after a step."""
        self.hand_over()

    def hand_over(self) -> None:
        """Give new state to the optimizer, after a step or one that failed, and drop all references."""
        view, self._view = self._view, None
        if view is not None:
            view.hand_over_state()


class _LocalTensors:
    """The parameters, gradients and state of an optimizer as local tensors."""

    def __init__(self, optimizer: Optimizer, moves_state: bool) -> None:
        self._optimizer = optimizer
        self._moves_state = moves_state
        self._sharded = _SHARDED_STATE[type(optimizer)]
        self._shown: list[tuple[UnevenDTensor, State]] = []
        self.state: Mapping[Tensor, State] = optimizer.state

    def look(self) -> list[dict[str, Any]]:
        """Return the current groups, with local parameters.

        With the optimizer's own parameters where a gradient or a state is not sharded as its parameter, or where the
        step is to be differentiated: DTensors then handle it, or say what is wrong.
        """
        self.hand_over_state()
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        states: dict[Tensor, State] = {}
        shown: list[dict[str, Any]] = []
        pairs: list[tuple[UnevenDTensor, State]] = []
        for group in groups:
            found = None if group.get("differentiable") else self._localise(group["params"])
            if found is None:
                if self._moves_state and _pages(self._optimizer):
                    raise _cannot_page(self._optimizer)
                self.state = self._optimizer.state
                return groups
            shown.append({**group, "params": [local for local, _ in found]})
            states.update(found)
            pairs += zip(group["params"], (state for _, state in found), strict=True)
        self.state, self._shown = states, pairs
        if self._moves_state:
            return _Turns(shown, groups, states, self._sharded)
        return shown

    def _localise(self, params: Sequence[Tensor]) -> list[tuple[Tensor, State]] | None:
        """Return each parameter with its gradient, and its state, as local tensors; None where that is impossible."""
        source, found = self._optimizer.state, []
        if len(set(map(id, params))) < len(params):
            return None  # a parameter that is listed twice is stepped twice on one state
        for param, grad in zip(params, get_grads(params, GRAD), strict=True):
            if type(param) is not UnevenDTensor:
                return None
            frame = param.shard_frame
            local = param._local_tensor.detach()  # shares the version counter, by which writes are noticed
            if grad is not None:
                if grad.dtype != param.dtype or not _is_sharded_as(frame, grad):
                    return None
                local.grad = grad._local_tensor  # type: ignore[attr-defined]
            state: State = {}
            for key, value in source.get(param, {}).items():
                if key in self._sharded and value is not None:
                    if not _is_sharded_as(frame, value):
                        return None
                    state[key] = value._local_tensor
                else:
                    state[key] = value
            found.append((local, state))
        return found

    def hand_over_state(self) -> None:
        """Give the optimizer the state that the step has made, sharded as its parameter where it is."""
        shown, self._shown, self.state = self._shown, [], self._optimizer.state
        for param, state in shown:
            if not state:
                continue
            own = self._optimizer.state[param]
            for key, value in state.items():
                if key not in self._sharded or value is None:
                    own[key] = value
                elif own.get(key) is None or own[key]._local_tensor is not value:
                    own[key] = UnevenDTensor.wrap(value, param.shard_frame)


class _Turns(list[dict[str, Any]]):
    """The groups of a step whose state rests elsewhere: each comes unit by unit, with its state for so long.

    Torch's steps iterate over their groups once, and what they do with one parameter depends on no other.
    """

    def __init__(
        self,
        shown: Sequence[dict[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[Tensor, State],
        sharded: frozenset[str],
    ) -> None:
        super().__init__(shown)
        self._groups, self._states, self._sharded = groups, states, sharded

    def __iter__(self) -> Iterator[dict[str, Any]]:
        devices: set[torch.device] = set()
        self._error: ConfigurationError | None = None
        self._taking_room: set[StateMemory] = set()
        for shown, group in zip(super().__iter__(), self._groups, strict=True):
            places = zip(shown["params"], map(memory_of, group["params"]), strict=True)
            for (memory, _), members in itertools.groupby(places, key=lambda place: (place[1][0], place[0].device)):
                turn = [(local, index) for local, (_, index) in members]
                devices.update(local.device for local, _ in turn)
                if memory is not None:
                    self._fetch(memory, turn)
                try:
                    yield {**shown, "params": [local for local, _ in turn]}
                finally:
                    if memory is not None:
                        self._give_back(memory, turn)
        for device in devices:
            finish_stream(device)  # the host reads what rests there
        if self._taking_room:  # in the first step, on all ranks alike
            for memory in self._taking_room:
                memory.was_refused = True
            self._groups[0]["params"][0]._megatron_fsdp_model.raise_together(self._error, "keeping optimizer state")
            for memory in self._taking_room:
                memory.was_refused = False

    def _fetch(self, memory: StateMemory, turn: Sequence[tuple[Tensor, int]]) -> None:
        for local, _ in turn if memory.is_paged else ():
            state = self._states[local]
            state.update((key, memory.fetch(state[key])) for key in _tensors(state, self._sharded))

    def _give_back(self, memory: StateMemory, turn: Sequence[tuple[Tensor, int]]) -> None:
        for local, index in turn:
            state = self._states[local]
            for key in _tensors(state, self._sharded):
                if memory.was_refused or not memory.has_room(key, state[key].dtype):
                    self._taking_room.add(memory)
                try:
                    state[key] = memory.keep(key, index, state[key])
                except ConfigurationError as error:
                    self._error = error  # nothing is lost: it stays where the step has made it


def _tensors(state: State, sharded: frozenset[str]) -> list[str]:
    """Return the keys of what is sharded as the parameter."""
    return [key for key, value in state.items() if key in sharded and value is not None]


def memory_of(param: Tensor) -> tuple[StateMemory | None, int]:
    """Return where the state of a sharded parameter rests, and its index there."""
    found: tuple[StateMemory | None, int] = param._megatron_fsdp_model.state_memory(param)  # type: ignore[attr-defined]
    return found


def rehome(optimizer: Optimizer) -> None:
    """Move state that was just loaded to where it rests."""
    devices: set[torch.device] = set()
    for param, state in optimizer.state.items():
        memory, index = memory_of(param)
        assert isinstance(param, UnevenDTensor)
        for key in _tensors(state, _SHARDED_STATE[type(optimizer)]) if memory is not None else ():
            assert memory is not None
            given = state[key]._local_tensor
            devices.add(given.device)
            state[key] = UnevenDTensor.wrap(memory.keep(key, index, given), param.shard_frame)
    for device in devices:
        finish_stream(device)  # the host reads what rests there


def check_homes(optimizer: Optimizer) -> None:
    """Refuse optimizers that cannot step while their state rests elsewhere than their parameters.

    Raises:
        ConfigurationError: It is not one of torch's elementwise ones, whose step runs on local tensors.
    """
    if not steps_locally(optimizer) and _pages(optimizer):
        raise _cannot_page(optimizer)


def _pages(optimizer: Optimizer) -> bool:
    """Return whether the state of any parameter rests elsewhere than the optimizer would make it."""
    return any(memory_of(param)[0] is not None for group in optimizer.param_groups for param in group["params"])


def _cannot_page(optimizer: Optimizer) -> ConfigurationError:
    return ConfigurationError(
        f"the state of {type(optimizer).__name__} cannot rest elsewhere than its parameters, since its step does not "
        'go element by element through local tensors of one dtype; give optimizer_state the home "host" in homes where '
        "main_weights rest elsewhere than on the device, and leave it out where they do not"
    )


def _is_sharded_as(frame: ShardFrame, value: object) -> bool:
    return type(value) is UnevenDTensor and (value.shard_frame is frame or value.shard_frame == frame)


@functools.cache
def _view_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the class of views for a class of optimizers, under its name, which torch's messages mention."""
    return type(kind.__name__, (LocalView, kind), {"__slots__": ()})


class LocalView(Optimizer):
    """An optimizer whose parameters and state are local tensors; everything else is the original's own."""

    __slots__ = ("_view",)
    _view: _LocalTensors

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The current groups: a closure may have changed gradients by the time that torch reads them."""
        return self._view.look()

    @property
    def state(self) -> Mapping[Tensor, State]:  # type: ignore[override]
        """State by parameter, as of the last read of `param_groups`."""
        return self._view.state
