"""The ways in which one optimizer is stepped on shards (`Step`), and the most common: on local tensors (`LocalStep`).

That one spares torch's elementwise optimizers the dispatch of each operation through DTensor.

During `step` the code of the optimizer's class works on a view: an object of the same kind that shares every
attribute with the optimizer but shows this rank's shards as plain tensors, with their gradients and state. The
optimizer itself, which hooks, closures, schedulers and checkpoints hold, has its DTensors throughout, so there is
nothing to restore, whatever happens inside. (Hooks get the view as `args[0]`; one that returns the optimizer there
instead has that step run on DTensors.)

    optimizer.param_groups[i]["params"][j]   a DTensor      view: a plain tensor over the same memory
    optimizer.state[param]["exp_avg"]        a DTensor      view: a plain tensor over the same memory

In the view small neighbours are one plain tensor (`segments.py`).
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_fsdp.comm.collectives import CommStream, Work, finish_stream, make_comm_stream
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import engine_of_param
from megatron_fsdp.engine.gradients import GRAD, get_grads, plain_attributes
from megatron_fsdp.engine.memory import FlatBuffer, allocate
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.segments import Segment, State, find_segments
from megatron_fsdp.sharding.placement import Layout, Region

SHARDED_STATE: dict[type[Optimizer], frozenset[str]] = {
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


def steps_locally(optimizer: Optimizer) -> bool:
    """Return True if an optimizer of this kind can step on local tensors."""
    return type(optimizer) in SHARDED_STATE


class Step:
    """Base class of the ways to step one optimizer: runs the step of the optimizer's class on a proxy."""

    def proxy(self, optimizer: Optimizer) -> Optimizer:
        """Return the proxy on which the code of the optimizer's class runs one step."""
        return optimizer

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure of the step."""
        return closure

    def finish(self, optimizer: Optimizer) -> None:
        """Collect the results of the step, at once after it."""

    def begin(self, optimizer: Optimizer) -> None:
        """Note that a step begins, before any of its hooks, one of which may fail on this rank alone."""

    def fail(self, error: BaseException) -> None:
        """Raise a RankError on all ranks, if others wait for this one, whose step has failed; collective then."""

    def hand_over(self) -> None:
        """Move remaining new state from the proxy to the optimizer, also after a step that failed."""


class ExchangingStep(Step):
    """A step with an exchange between ranks, who first agree that none has failed."""

    def __init__(self) -> None:
        self._begun: weakref.ref[Optimizer] | None = None  # until ranks have agreed for the first time in its step

    def begin(self, optimizer: Optimizer) -> None:
        """Note that other ranks will wait for this one."""
        self._begun = weakref.ref(optimizer)

    def fail(self, error: BaseException) -> None:
        """Raise a RankError on all ranks, if they have not agreed in this step yet."""
        optimizer = None if self._begun is None else self._begun()
        if optimizer is not None:
            self.agree(optimizer, error)

    def agree(self, optimizer: Optimizer, error: BaseException | None) -> None:
        """Raise the error of any rank on all ranks of the exchange; collective."""
        raise NotImplementedError


def params_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def without_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the part of an optimizer's state that belongs to no parameter, such as a count of steps, by text key."""
    return {key: value for key, value in state.items() if isinstance(key, str)}


class LocalStep(Step):
    """Steps a view of one optimizer over local tensors, without communication; between steps it holds no gradients.

    `moves_state`: state of some parameters is offloaded.
    """

    def __init__(self, moves_state: bool = False) -> None:
        self._streams = _StateStreams() if moves_state else None
        self._view: _LocalTensors | None = None  # of the running step
        self._kept: _Kept | None = None  # of the last one
        self.has_stepped = False  # so that there is state, in the order of parameters and in its place
        self.leaves_out: frozenset[int] = frozenset()  # ids of parameters that the next step finds stepped
        self.check: Callable[[], None] | None = None  # called by that step, behind all hooks

    def part(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> LocalView:
        """Return a view that steps some parameters alone; call its `hand_over` after it."""
        return _view_of(optimizer, _LocalTensors(optimizer, None, list(groups)))

    def proxy(self, optimizer: Optimizer) -> Optimizer:
        """Return the proxy to step instead of a connected optimizer; call `finish` after the step.

        A view that works on local tensors; the optimizer itself where its kind is not known to be elementwise, or where
        the step is compiled or runs in inference mode.
        """
        if self._view is not None:  # of a step that failed
            self.hand_over()
        groups, left_out, self.leaves_out = None, self.leaves_out, frozenset()
        check, self.check = self.check, None
        if left_out:
            groups = [
                {**group, "params": [param for param in group["params"] if id(param) not in left_out]}
                for group in optimizer.param_groups
            ]
        elif not steps_locally(optimizer) or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return optimizer
        kept, self._kept = self._kept, None  # so that only the view holds its memory
        self._view = _LocalTensors(optimizer, self._streams, groups, check, None if groups else kept)
        return _view_of(optimizer, self._view)

    def finish(self, _optimizer: Optimizer) -> None:
        """Move new state to the optimizer after a step."""
        self.hand_over()
        self.has_stepped = True

    def hand_over(self) -> None:
        """Move new state to the optimizer after a step or one that failed; without one drop the tensors kept."""
        view, self._view = self._view, None
        if view is not None:
            view.hand_over_state()
        self._kept = None if view is None else view.kept


Piece = tuple[slice, Segment | None]
"""Parameters of a group, by position, that are stepped as one segment, or one by one."""


class _Kept:
    """The local tensors of a step, which the next one shows again if nothing was exchanged: so it nearly always is.

    Making them anew takes as long as the step of a small model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[Mapping[str, Any]],
        local: list[list[Tensor]],
        states: dict[Tensor, State],
        pieces: list[list[Piece]],
    ) -> None:
        self.params = [list(group["params"]) for group in groups]
        self.local = local  # of each group
        self.states = states  # by local parameter, or segment of them
        self.pieces = pieces  # of each group
        self.segments = [segment for of_group in pieces for _, segment in of_group if segment is not None]
        self._memory = [list(map(_local_tensor, params)) for params in self.params]
        self.note_states(optimizer)

    def note_states(self, optimizer: Optimizer) -> None:
        """Note the optimizer's states, and the local ones, which equal them."""
        self._own, self._shown = _values(optimizer.state), _values(self.states)
        self._tensors = [value for value in self._own if type(value) is UnevenDTensor]
        self._memory_of_states = list(map(_local_tensor, self._tensors))

    def has_new_states(self) -> bool:
        """Return True if the step has made or exchanged states."""
        return not _are_same(_values(self.states), self._shown)

    def is_of(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if parameters, their memory and all states are the noted ones."""
        return (
            len(groups) == len(self.params)
            and all(_are_same(group["params"], params) for group, params in zip(groups, self.params, strict=True))
            and all(
                _are_same(list(map(_local_tensor, params)), memory)
                for params, memory in zip(self.params, self._memory, strict=True)
            )
            and _are_same(_values(optimizer.state), self._own)
            and _are_same(list(map(_local_tensor, self._tensors)), self._memory_of_states)
        )


_local_tensor = attrgetter("_local_tensor")


def _values(states: Mapping[Tensor, State]) -> list[Any]:
    """Return all states, of any type that users may have put there, and their contents."""
    of_each: list[Any] = list(states.values())
    inside = of_each if set(map(type, of_each)) == {dict} else [each for each in of_each if isinstance(each, dict)]
    return [*of_each, *itertools.chain.from_iterable(map(dict.values, inside))]


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two sequences hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


class _LocalTensors:
    """The parameters, gradients and state of an optimizer as local tensors."""

    def __init__(
        self,
        optimizer: Optimizer,
        streams: _StateStreams | None,
        groups: list[dict[str, Any]] | None = None,
        check: Callable[[], None] | None = None,
        kept: _Kept | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.groups = groups or ()  # to be shown instead of all current ones
        self._joins = groups is None and streams is None  # neighbours to segments, which are kept for the next step
        self._check = check  # of what hooks may have changed
        self._streams = streams  # where state moves, if it does
        self._sharded = SHARDED_STATE[type(optimizer)]
        self.kept = kept
        self._shows_kept = False
        self.state: Mapping[Tensor, State] = optimizer.state

    def look(self) -> list[dict[str, Any]]:
        """Return the current groups, with local parameters.

        With the optimizer's own parameters where a gradient or a state is not sharded as its parameter, or where the
        step is to be differentiated: DTensors then handle it, or say what is wrong.
        """
        self.hand_over_state()
        if self._check is not None:
            self._check()
        groups: list[dict[str, Any]] = self._optimizer.param_groups if not self.groups else list(self.groups)
        with plain_attributes():
            if self.kept is None or not self.kept.is_of(self._optimizer, groups):
                self.kept = None  # frees its states, before others are joined
                self.kept = self._localise(groups)
            local = None if self.kept is None else self._with_gradients(self.kept)
            self._shows_kept = local is not None
        if self.kept is None or local is None or any(group.get("differentiable") for group in groups):
            self.hand_over_state()
            if self._streams is not None and _pages(self._optimizer):
                raise _cannot_page(self._optimizer)
            return groups
        self.state = self.kept.states
        shown = [{**group, "params": params} for group, params in zip(groups, local, strict=True)]
        if self._streams is not None:
            return _StepChunks(shown, groups, self.kept.states, self._sharded, self._streams)
        return shown

    def _localise(self, groups: Sequence[Mapping[str, Any]]) -> _Kept | None:
        """Return all parameters and their states as local tensors; None if that is impossible."""
        source, shown = self._optimizer.state, list[list[Tensor]]()
        states: dict[Tensor, State] = {}
        for group in groups:
            params = group["params"]
            if len(set(map(id, params))) < len(params):
                return None  # a parameter that is listed twice is stepped twice on one state
            shown.append([])
            for param in params:
                if type(param) is not UnevenDTensor:
                    return None
                local = param._local_tensor.detach()  # shares the version counter, by which writes are noticed
                shown[-1].append(local)
                state = states[local] = {}
                for key, value in source.get(param, {}).items():
                    is_sharded = key in self._sharded and value is not None
                    if is_sharded and not _is_sharded_as(param.shard_spec, value):
                        return None
                    state[key] = value._local_tensor if is_sharded else value
        pieces: list[list[Piece]] = []
        for group, local_params in zip(groups, shown, strict=True):
            pieces.append([] if self._joins else [(slice(None), None)])
            for members, segment in find_segments(group["params"], local_params, states) if self._joins else ():
                if segment is not None and segment.try_to_join_states(self._sharded):
                    self._move_states(segment.params, segment.local, states)
                    pieces[-1].append((members, segment))
                else:
                    pieces[-1].append((members, None))
        return _Kept(self._optimizer, groups, shown, states, pieces)

    @staticmethod
    def _with_gradients(kept: _Kept) -> list[list[Tensor]] | None:
        """Return each group's local tensors with their gradients; None if one is not sharded as its parameter."""
        shown: list[list[Tensor]] = []
        for params, local_params, pieces in zip(kept.params, kept.local, kept.pieces, strict=True):
            grads = get_grads(params, GRAD)
            shown.append([])
            for members, segment in pieces:
                if segment is not None and segment.try_to_show(grads[members]):
                    shown[-1].append(segment.whole)
                    continue
                for param, local, grad in zip(params[members], local_params[members], grads[members], strict=True):
                    if grad is not None:
                        if grad.dtype != local.dtype or not _is_sharded_as(param.shard_spec, grad):
                            return None
                        local.grad = _local_tensor(grad)
                shown[-1] += local_params[members]
        return shown

    def hand_over_state(self) -> None:
        """Move the state that the step has made to the optimizer, sharded as its parameter where it has its shape."""
        self.state, kept = self._optimizer.state, self.kept
        if kept is None:
            return
        for local in itertools.chain(*kept.local, (segment.whole for segment in kept.segments)):
            local.grad = None  # whose memory is given back between steps
        if not self._shows_kept:
            return
        self._shows_kept = False
        has_new_states = kept.has_new_states()
        for segment in kept.segments:
            segment.share_states()
        if not has_new_states:
            return
        for params, local_params in zip(kept.params, kept.local, strict=True):
            self._move_states(params, local_params, kept.states)
        kept.note_states(self._optimizer)
        if any(segment.lacks_state for segment in kept.segments):
            self.kept = None  # to be joined at the next step

    def _move_states(
        self, params: Sequence[UnevenDTensor], local: Sequence[Tensor], states: dict[Tensor, State]
    ) -> None:
        for param, shard in zip(params, local, strict=True):
            state = states[shard]
            if not state:
                continue
            own = self._optimizer.state[param]
            for key, value in state.items():
                if key not in self._sharded or value is None:
                    own[key] = value
                elif own.get(key) is None or own[key]._local_tensor is not value:
                    own[key] = UnevenDTensor.wrap(value, param.shard_spec)


class _StateStreams:
    """Two copy streams for each device: offloaded state comes on one and goes on the other, at the same time."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, str], CommStream] = {}

    def copy(self, device: torch.device, name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Work:
        """Start to copy from the first of each pair to the second, which are kept until the work was waited for."""
        stream = self._made.get((device, name))
        if stream is None:
            stream = self._made[device, name] = make_comm_stream(device, name)

        def copy(_async_op: bool) -> None:
            for source, target in pairs:
                target.copy_(source, non_blocking=True)

        return stream.submit(copy)


class StateMemory:
    """Host memory of one parameter group's offloaded optimizer state, as far as it is shaped as the parameters.

    A step works on copies on the device, unit by unit.
    """

    def __init__(self, layout: Layout, region: Region, device: torch.device) -> None:
        """Allocate nothing yet: names and dtypes of states are known after the first step."""
        self._layout, self._region, self._device = layout, region, device
        self._buffers: dict[tuple[str, torch.dtype], FlatBuffer] = {}
        self._shard_views: dict[tuple[str, int], torch.Tensor] = {}

    def place(self, key: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the host tensor of a state of parameter `index`; the same one every time for a dtype."""
        found = self._shard_views.get((key, index))
        if found is None or found.dtype != dtype:
            buffer = self._buffers.get((key, dtype))
            if buffer is None:
                memory = allocate(True, self._region.numel, dtype, self._device)
                buffer = self._buffers[key, dtype] = FlatBuffer(self._layout, self._region, memory)
            found = self._shard_views[key, index] = buffer.local_shard(index)
        return found

    def borrow(self, value: torch.Tensor) -> torch.Tensor:
        """Return memory on the device for a copy of a state, uninitialised."""
        return torch.empty_like(value, device=self._device, pin_memory=False)


@dataclass(eq=False)
class _StepChunk:
    """A chunk of the step: parameters of one group with state in one place; `comes` is on its way to the device."""

    group: dict[str, Any]
    memory: StateMemory | None
    device: torch.device
    members: list[tuple[Tensor, int]]  # with the index of each in that place
    comes: list[tuple[State, str, Tensor]] = field(default_factory=list)
    work: Work | None = None

    def receive(self) -> None:
        """Wait for the state, and show it to the optimizer."""
        if self.work is not None:
            self.work.wait()
        for state, key, value in self.comes:
            state[key] = value
        self.comes, self.work = [], None


class _StepChunks(list[dict[str, Any]]):
    """The groups of a step with offloaded state, which streams to the device and back, unit by unit.

    While a unit steps, the state of the next one comes and that of the one before goes. Memory for what comes is
    allocated on the compute stream, behind a wait for what has left: at most three units have state on the device.

    Torch's steps iterate over their groups once, and what they do with one parameter depends on no other.
    """

    def __init__(
        self,
        shown: Sequence[dict[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[Tensor, State],
        sharded: frozenset[str],
        streams: _StateStreams,
    ) -> None:
        super().__init__(shown)
        self._groups, self._states, self._sharded, self._streams = groups, states, sharded, streams

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._going: deque[tuple[Work, list[Tensor]]] = deque()
        chunks = list(self._find_chunks())
        try:
            for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
                if chunk is chunks[0]:
                    self._fetch(chunk)
                self._let_go(1)
                if following is not None:
                    self._fetch(following)
                chunk.receive()
                try:
                    yield {**chunk.group, "params": [local for local, _ in chunk.members]}
                finally:
                    self._give_back(chunk)
        finally:
            for chunk in chunks:
                if chunk.work is not None:  # it came for nothing: the step has failed
                    chunk.work.wait()
                    chunk.comes.clear()
            self._let_go(0)
        for device in {chunk.device for chunk in chunks}:
            finish_stream(device)  # the host may read offloaded state from here on

    def _find_chunks(self) -> Iterator[_StepChunk]:
        for shown, group in zip(super().__iter__(), self._groups, strict=True):
            places = zip(shown["params"], map(memory_of, group["params"]), strict=True)
            by_place = itertools.groupby(places, key=lambda place: (place[1][0], place[0].device))
            for (memory, device), members in by_place:
                yield _StepChunk(shown, memory, device, [(local, index) for local, (_, index) in members])

    def _fetch(self, chunk: _StepChunk) -> None:
        """Start to copy the state of a chunk to the device."""
        memory, pairs = chunk.memory, []
        for local, _ in chunk.members if memory is not None else ():
            assert memory is not None
            state = self._states[local]
            for key in _tensors(state, self._sharded):
                pairs.append((state[key], memory.borrow(state[key])))
                chunk.comes.append((state, key, pairs[-1][1]))
        if pairs:
            chunk.work = self._streams.copy(chunk.device, "state comes", pairs)

    def _give_back(self, chunk: _StepChunk) -> None:
        """Start to copy the state of a chunk back to the host."""
        memory, pairs = chunk.memory, []
        for local, index in chunk.members if memory is not None else ():
            assert memory is not None
            state = self._states[local]
            for key in _tensors(state, self._sharded):
                value = state[key]
                state[key] = memory.place(key, index, value.dtype)
                if state[key] is not value:
                    pairs.append((value, state[key]))
        if pairs:
            self._going.append((self._streams.copy(chunk.device, "state goes", pairs), [value for value, _ in pairs]))

    def _let_go(self, count: int) -> None:
        """Free device copies of state older than the last `count`, after their write-back."""
        while len(self._going) > count:
            work, copies = self._going.popleft()
            work.wait()
            copies.clear()


def _tensors(state: State, sharded: frozenset[str]) -> list[str]:
    """Return the keys of state tensors that are sharded as the parameter."""
    return [key for key, value in state.items() if key in sharded and value is not None]


def memory_of(param: Tensor) -> tuple[StateMemory | None, int]:
    """Return the memory of a sharded parameter's offloaded state, and its index there.

    None if its state is not offloaded, or lies beside offloaded main weights, where the optimizer allocates it.
    """
    group, index = engine_of_param(param).group_and_index[id(param)]
    plan = group.plan
    if not plan.offload.optimizer_state or not plan.requires_grad or plan.offloads_main:
        return None, index
    if group.state_memory is None:
        group.state_memory = StateMemory(plan.layout, group.weights.main.region, plan.device)
    return group.state_memory, index


def move_to_offload(optimizer: Optimizer) -> None:
    """Move state that was just loaded to its offload memory."""
    devices: set[torch.device] = set()
    for param in params_of(optimizer):
        state: State = optimizer.state.get(param, {})
        memory, index = memory_of(param)
        assert isinstance(param, UnevenDTensor)
        for key in _tensors(state, SHARDED_STATE[type(optimizer)]) if memory is not None else ():
            assert memory is not None
            given = state[key]._local_tensor
            kept = memory.place(key, index, given.dtype)
            if kept is not given:
                kept.copy_(given, non_blocking=True)
            devices.add(given.device)
            state[key] = UnevenDTensor.wrap(kept, param.shard_spec)
    for device in devices:
        finish_stream(device)  # the host may read offloaded state from here on


def check_offload(optimizer: Optimizer) -> None:
    """Raise for an optimizer that cannot step with state offloaded and parameters on the device."""
    if not steps_locally(optimizer) and _pages(optimizer):
        raise _cannot_page(optimizer)


def _pages(optimizer: Optimizer) -> bool:
    """Return True if the state of any parameter is offloaded."""
    return any(memory_of(param)[0] is not None for param in params_of(optimizer))


def _cannot_page(optimizer: Optimizer) -> ConfigurationError:
    return ConfigurationError(
        f"the state of {type(optimizer).__name__} cannot rest elsewhere than its parameters, since its step does not "
        "go element by element through local tensors of one dtype; offload main_weights, too, or leave "
        "optimizer_state out of offload"
    )


def _is_sharded_as(spec: ShardSpec, value: object) -> bool:
    return type(value) is UnevenDTensor and (value.shard_spec is spec or value.shard_spec == spec)


def _view_of(optimizer: Optimizer, view: _LocalTensors) -> LocalView:
    kind = _view_class(type(optimizer))  # type: ignore[arg-type]  # mypy: classes with a __hash__
    made: LocalView = kind.__new__(kind)
    made.__dict__ = optimizer.__dict__  # one dict: the step may read and write any attribute
    made._view = view
    return made


@functools.cache
def _view_class(kind: type[Optimizer]) -> type[LocalView]:
    """Return the class of views for a class of optimizers, under its name, which torch's messages mention."""
    return type(kind.__name__, (LocalView, kind), {"__slots__": ()})


class LocalView(Optimizer):
    """An optimizer whose parameters and state are local tensors; everything else is the original's own."""

    __slots__ = ("_view",)
    _view: _LocalTensors

    def hand_over(self) -> None:
        """Move new state to the optimizer."""
        self._view.hand_over_state()

    @property
    def shown_groups(self) -> Sequence[Mapping[str, Any]]:
        """The groups as they are, of parameters that are DTensors."""
        return self._view.groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The current groups: a closure may have changed gradients by the time that torch reads them."""
        return self._view.look()

    @property
    def state(self) -> Mapping[Tensor, State]:  # type: ignore[override]
        """State by parameter, as of the last read of `param_groups`."""
        return self._view.state
