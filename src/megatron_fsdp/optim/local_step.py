"""Let torch's elementwise optimizers step on flat local tensors, without a detour through DTensor for each operation.

During `step` the code of the optimizer's class works on a stand-in: an object of the same kind that shares every
attribute with the optimizer but shows this rank's shards as parameters, joined to runs (below), with their
gradients and their state. The optimizer itself, which hooks, closures, schedulers and checkpoints hold, has its
DTensors throughout, so there is nothing to restore, whatever happens inside. (Hooks get the stand-in as `args[0]`; one
that returns the optimizer there instead has that step run on DTensors.)

    optimizer.param_groups[i]["params"][j]   a DTensor      stand-in: part of a plain tensor over the same memory
    optimizer.state[param]["exp_avg"]        a DTensor      stand-in: part of a plain tensor; wrapped part by part
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp.comm.axis import address_of, has_values
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.gradients import GRAD, get_grads

# Runs: parameters that lie side by side in memory, with their gradients, seen by an optimizer as one flat tensor.
#
# What an elementwise optimizer does costs a few calls per tensor, so a hundred small parameters of a unit, which share
# one flat buffer, are a hundred times cheaper as one. State that the optimizer makes for a run is one flat tensor too;
# in the optimizer's own state each parameter has its part of that, a DTensor like the parameter, and its own number of
# steps. Nobody who looks at the optimizer sees runs.
#
#     members     a.weight | a.bias | b.weight        DTensors, state a view each of the run's
#     run         [------- one tensor --------]       state one tensor

States = Mapping[Tensor, dict[str, Any]]

_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of state that is a number for each parameter in torch's elementwise optimizers."""
_PLAIN = frozenset({int, float, bool, type(None)})


class _Member(NamedTuple):
    """A parameter that is about to be stepped.

    Attributes:
        param: As the optimizer holds it.
        local: This rank's elements.
        grad: This rank's elements of its gradient.
        own: Its state; empty where there is none yet.
        kind: What all members of a run have in common: dtype, keys of the state, numbers in it.
    """

    param: UnevenDTensor
    local: Tensor
    grad: Tensor
    own: dict[str, Any]
    kind: tuple[object, ...]


class _Parts:
    """Which part of a run belongs to which member.

    Attributes:
        params: The members, in the order of their memory.
        numel: Elements of all.
    """

    def __init__(self, params: Sequence[UnevenDTensor], slots: frozenset[str]) -> None:
        self.params = tuple(params)
        self._slots = slots
        stops = list(itertools.accumulate(param._local_tensor.numel() for param in params))
        self._cuts = list(zip([0, *stops], stops, strict=False))
        self.numel = stops[-1]

    def is_cut(self, key: str, value: Any) -> bool:
        """Whether some state is cut as its parameter."""
        return key in self._slots and value is not None

    def is_number_each(self, key: str, value: Any) -> bool:
        """Whether each member has a tensor of one element of its own for this, such as its number of steps.

        In a simulated rank they share one: torch reads it, and only those that it has made itself have values there.
        """
        return len(self.params) > 1 and _is_number(key, value) and has_values(value)

    def spread(self, key: str, value: Any, source: States) -> Any:
        """Give each member its part of a value in the state of all; returns what the run itself goes on with."""
        if self.is_cut(key, value):
            for param, (start, stop) in zip(self.params, self._cuts, strict=True):
                part = value[start:stop].view(param._local_tensor.shape)
                source[param][key] = UnevenDTensor.wrap(part, param.shard_frame)
            return value
        if not self.is_number_each(key, value):
            for param in self.params:
                source[param][key] = value
            return value
        numbers = value.detach().expand(len(self.params)).clone()
        for index, param in enumerate(self.params):
            source[param][key] = numbers[index]
        return source[self.params[0]][key]

    def join(self, key: str, source: States) -> None:
        """Bring together what lies apart, as after `load_state_dict`."""
        values = [source[param][key] for param in self.params]
        if self.is_cut(key, values[0]):
            locals_ = [value._local_tensor for value in values]
            if not _are_joined(locals_):
                self.spread(key, torch.cat([local.reshape(-1) for local in locals_]), source)
        elif self.is_number_each(key, values[0]) and not (_are_joined(values) and _are_views_of_one(values)):
            self.spread(key, values[0], source)

    def shown(self, source: States) -> dict[str, Any]:
        """The state of the first member as that of the run."""
        slots, numel = self._slots, self.numel
        return {
            key: _joined(value._local_tensor, numel) if key in slots and value is not None else value
            for key, value in source.get(self.params[0], {}).items()
        }


class Run:
    """Some parameters as one.

    Attributes:
        params: Its members, in the order of their memory.
        flat: Their elements, (numel,), over the memory of the shards.
        state: What is shown as the state of `flat`; empty between steps.
    """

    def __init__(self, members: Sequence[_Member], slots: frozenset[str], source: States) -> None:
        self._parts = _Parts([member.param for member in members], slots)
        self.params = self._parts.params
        self.flat = _joined(members[0].local, self._parts.numel)
        self.state = RunState(self._parts)
        self._grad_is_joined = _are_joined([member.grad for member in members])
        for key in members[0].own:
            self._parts.join(key, source)

    def show(self, grad: Tensor, source: States) -> None:
        """Show the gradients of now, of which the first member's elements here are given, and the state of now."""
        self.flat.grad = _joined(grad, self._parts.numel) if self._grad_is_joined else grad.reshape(-1)
        self.state.show(source)

    def numbers(self) -> list[Tensor]:
        """What each member has a number of its own of, all members' together: some (members,), while state is shown."""
        count = len(self.params)
        return [_joined(value, count) for key, value in self.state.items() if self._parts.is_number_each(key, value)]

    def hide(self) -> None:
        """The step is over; hold no gradient and no state."""
        self.flat.grad = None
        self.state.forget()

    def takes_gradients(self) -> bool:
        """Whether gradients that are there now, of every member, can be shown as one."""
        grads: list[Any] = [param.grad for param in self.params]
        fit = all(_fits(param, grad) for param, grad in zip(self.params, grads, strict=True))
        self._grad_is_joined = fit and _are_joined([grad._local_tensor for grad in grads])
        return self._grad_is_joined or (fit and len(grads) == 1)


class RunState(dict[str, Any]):
    """The state of a run; what is set here is set in the state of every member at once.

    Attributes:
        was_set: Whether anything was, since it is shown.
    """

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._source: States | None = None
        self.was_set = False

    def show(self, source: States) -> None:
        """Show what there is."""
        self._source = source
        self.clear()
        self.update(self._parts.shown(source))

    def forget(self) -> None:
        """Show nothing."""
        self.clear()
        self._source = None
        self.was_set = False

    def __setitem__(self, key: str, value: Any) -> None:
        assert self._source is not None
        if key not in self or value is not self[key]:
            self.was_set = True
            super().__setitem__(key, self._parts.spread(key, value, self._source))


def find_runs(params: Iterable[UnevenDTensor], source: States, slots: frozenset[str]) -> list[Run] | None:
    """Join parameters that have gradients into as few runs as there can be.

    Args:
        params: Of one group of an optimizer.
        source: The optimizer's state.
        slots: Keys of state that is cut as its parameter.

    Returns:
        The runs; None where some gradient or state is not cut as its parameter, or of another dtype, or where a
        parameter is listed twice.
    """
    params = tuple(params)
    if len(set(map(id, params))) < len(params):
        return None
    members = []
    for param in params:
        grad: Any = param.grad
        if grad is None:
            continue
        own = source.get(param) or {}
        cut = [value for key, value in own.items() if key in slots and value is not None]
        if not _fits(param, grad) or not all(_is_cut_as(param.shard_frame, value) for value in cut):
            return None
        kind = (param.dtype, *((key, _kind(key, value, key in slots)) for key, value in own.items()))
        members.append(_Member(param, param._local_tensor, grad._local_tensor, own, kind))
    members.sort(key=lambda member: (not member.local.numel(), address_of(member.local)))
    starts = [index for index, member in enumerate(members) if not index or not _continues(members[index - 1], member)]
    return [Run(members[start:stop], slots, source) for start, stop in itertools.pairwise([*starts, len(members)])]


def lie_apart(runs: Sequence[Run]) -> bool:
    """Whether no run begins where another ends, so that weights are what keeps them apart and nothing else."""
    return not any(_are_joined([before.flat, run.flat]) for before, run in itertools.pairwise(runs))


def _continues(before: _Member, member: _Member) -> bool:
    return (
        before.kind == member.kind
        and _are_joined([before.local, member.local])
        and _are_joined([before.grad, member.grad])
    )


def _kind(key: str, value: Any, is_cut: bool) -> object:
    """What states of one run have to agree on: dtype and place of tensors, the value of numbers."""
    if is_cut and value is not None:
        return value.dtype, value.device
    if _is_number(key, value):
        return value.dtype, value.device, value.item() if has_values(value) else None
    return value if type(value) in _PLAIN else id(value)  # nothing that is known to be one for each parameter


def _is_number(key: str, value: object) -> bool:
    return key in _NUMBERS and isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == 0


def _fits(param: UnevenDTensor, grad: Any) -> bool:
    return grad.dtype == param.dtype and _is_cut_as(param.shard_frame, grad)


def _is_cut_as(frame: ShardFrame, value: object) -> bool:
    return type(value) is UnevenDTensor and (value.shard_frame is frame or value.shard_frame == frame)


def _are_joined(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors follow one another in one memory; those without elements do anywhere."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    return all(
        (not before.numel() and not tensor.numel())
        or (
            before.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            and address_of(before) + before.numel() * before.element_size() == address_of(tensor)
        )
        for before, tensor in itertools.pairwise(tensors)
    )


def _are_views_of_one(numbers: Sequence[Tensor]) -> bool:
    """Whether the version counter of one tells of writes to any; those that `torch.load` reads have one each."""
    base = numbers[0]._base
    return base is not None and all(number._base is base for number in numbers)


def _joined(first: Tensor, numel: int) -> Tensor:
    """Some elements (numel,) from the first of a tensor on, a view of its memory."""
    plain = first.detach() if first.requires_grad else first
    return plain.as_strided((numel,), (1,))


# Tell whether objects are the very ones of before, without keeping the tensors among them alive.


class SameObjects:
    """Some objects in their order, to be compared by identity later.

    Args:
        things: Tensors are held weakly, so that their memory goes when nobody else wants it; all else is kept.
    """

    def __init__(self, things: Iterable[object]) -> None:
        self._gone: list[object] = []
        self._held = [*(_reference(thing, self._gone.append) for thing in things), lambda: _END]

    def are(self, things: Iterable[object]) -> bool:
        """Whether these are the same objects in the same order."""
        # One that is gone looks like None.
        return not self._gone and all(map(is_, chain(things, (_END,)), map(call, self._held)))


class SameState:
    """All that there is in the state of an optimizer, to be compared later.

    Args:
        source: The state: tensors under names, by parameter.
    """

    def __init__(self, source: Mapping[Any, Any]) -> None:
        states = _states_of(source)
        self._is_known = states is not None
        self._params = SameObjects(source)
        self._counts = list(map(len, states or ()))
        self._names = list(chain.from_iterable(states or ()))
        self._things = SameObjects(chain.from_iterable(map(_values, states or ())))

    def is_in(self, source: Mapping[Any, Any]) -> bool:
        """Whether there are the same objects under the same names for the same parameters, in the same order."""
        states = _states_of(source)
        return (
            self._is_known
            and states is not None
            and self._params.are(source)
            and self._things.are(chain.from_iterable(map(_values, states)))
            and list(map(len, states)) == self._counts
            and all(map(is_, chain.from_iterable(states), self._names))
        )


def _states_of(source: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """The state of each parameter; None where somebody keeps there what is none."""
    states = list(source.values())
    return states if set(map(type, states)) <= {dict} else None


def _reference(thing: object, note_gone: Callable[[object], None]) -> Callable[[], object]:
    return weakref.ref(thing, note_gone) if isinstance(thing, torch.Tensor) else lambda: thing


_END = object()
_values = dict.values


# The runs of one parameter group of an optimizer, kept from step to step for as long as they are right.

_BATCH_NUMEL = 1 << 18
"""Elements of which a few tensors fit into the cache of a core."""


class GroupRuns:
    """The runs of a parameter group, and by what they are known to be right still in the next step.

    Between steps it holds neither gradients nor state but for numbers of steps.

    Args:
        params: Of the group.
        runs: Of those that have gradients, as of now.

    Attributes:
        runs: The same.
        flats: What the runs show as parameters.
        batches: The same in lists of few elements, for optimizers that make temporary tensors of a list at a time.
        states: What the runs show as state, by what they show as parameter.
        is_new: Whether they were found since the last step.
    """

    def __init__(self, params: Sequence[UnevenDTensor], runs: Sequence[Run]) -> None:
        self.runs = runs
        self.flats = [run.flat for run in runs]
        self.batches = list(_batches(self.flats))
        self.states: dict[Tensor, RunState] = {run.flat: run.state for run in runs}
        self.is_new = True
        self._params = tuple(params)
        self._firsts = [run.params[0] for run in runs]
        self._locals = tuple(map(_local_tensor, params))
        self._lie_apart = lie_apart(runs)  # other gradients could not make fewer of them
        self._numbers = _Numbers(())
        self._grads = SameObjects(())
        self._has_grad: list[bool] = []
        self._grads_are_known = False  # all are those seen last

    def are_right(self, params: Sequence[UnevenDTensor]) -> bool:
        """Whether parameters are the same objects as after the last step, and gradients lie as they did.

        The caller has seen that there is the same state.
        """
        self._grads_are_known = False
        if not (
            not self.is_new
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and all(map(is_, map(_local_tensor, params), self._locals))
            and self._numbers.are_as_left()
        ):
            return False
        grads = get_grads(params, GRAD)
        self._grads_are_known = self._grads.are(grads)
        return self._grads_are_known or (
            self._lie_apart
            and [grad is not None for grad in grads] == self._has_grad
            and all(run.takes_gradients() for run in self.runs)
        )

    def show(self, source: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Show gradients and state of now."""
        grads: list[Any] = get_grads(self._firsts, GRAD)
        for run, grad in zip(self.runs, grads, strict=True):
            run.show(grad._local_tensor, source)

    def level(self) -> None:
        """Let every member have made the step that the first of its run has made."""
        if self.is_new or self._has_new_state():
            self._numbers = _Numbers([numbers for run in self.runs for numbers in run.numbers()])
        self._numbers.level()

    def release(self, source: dict[torch.Tensor, dict[str, Any]]) -> bool:
        """Leave state in the order of parameters, which all ranks share, and hold neither gradients nor state.

        To be called when all groups are level: some have numbers in one memory.

        Returns:
            Whether the state may be other objects than before the step.
        """
        has_new_state = self._has_new_state()
        for run in self.runs:
            run.hide()
        self._numbers.note()
        if has_new_state:
            for param in self._params:  # as without runs: people walk through states with a collective for each
                if param in source:
                    source[param] = source.pop(param)
        if not self._grads_are_known:
            grads = get_grads(self._params, GRAD)
            self._has_grad = [grad is not None for grad in grads]
            self._grads = SameObjects(grads)
        was_new, self.is_new = self.is_new, False
        return was_new or has_new_state

    def _has_new_state(self) -> bool:
        return any(run.state.was_set for run in self.runs)


class _Numbers:
    """The numbers that members of runs have one each of, such as their steps.

    Args:
        together: Those of all members of a run, (members,); one version counter tells of writes to any.
    """

    def __init__(self, together: Sequence[Tensor]) -> None:
        self._firsts = [numbers[:1].expand(len(numbers) - 1) for numbers in together]
        self._others = [numbers[1:] for numbers in together]
        self._versions: list[int] = []

    def level(self) -> None:
        """Give all members what the first ones have."""
        if self._others:
            torch._foreach_copy_(self._others, self._firsts)

    def note(self) -> None:
        """They are as they should be."""
        self._versions = list(map(_version, self._others))

    def are_as_left(self) -> bool:
        """Whether nobody has written to them since."""
        return list(map(_version, self._others)) == self._versions


def _batches(flats: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of few elements, or of one tensor; a single list where starting a kernel takes longer than so few do."""
    batch: list[Tensor] = []
    numel = 0
    for flat in flats:
        numel += flat.numel()
        if batch and flat.is_cpu and numel > _BATCH_NUMEL:
            yield batch
            batch, numel = [], flat.numel()
        batch.append(flat)
    yield batch


_local_tensor = attrgetter("_local_tensor")
_version = attrgetter("_version")


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
    """Makes stand-ins for one optimizer, and keeps its runs from step to step.

    Between steps it holds neither gradients nor state, whose memory others may want to give back.
    """

    def __init__(self) -> None:
        self._groups: list[GroupRuns] = []
        self._state: SameState | None = None  # after the last step
        self._source: dict[torch.Tensor, dict[str, Any]] | None = None

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        """What to step in place of a connected optimizer; call `release` after the step.

        Returns:
            A stand-in that works on local tensors; the optimizer itself where its kind is not known to be elementwise,
            or where the step is compiled or runs in inference mode.
        """
        self.abandon()
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
        source, self._source = self._source, None
        if source is not None:
            for group in self._groups:
                group.level()
            may_be_others = [group.release(source) for group in self._groups]  # of all of them
            if self._state is None or any(may_be_others):
                self._state = SameState(source)

    def abandon(self) -> None:
        """A step has failed, if any was under way; what was found for it may have changed since, so find it anew."""
        if self._source is not None:
            self.release()
            self._groups = []

    def localise(
        self, optimizer: Optimizer, slots: frozenset[str]
    ) -> tuple[list[dict[str, Any]], dict[torch.Tensor, RunState]] | None:
        """Parameters with their gradients, and their state, as local tensors of now, joined into runs.

        None where anything in them is not cut as its parameter, or where the step is to be differentiated: DTensors
        then take care of it, or say what is wrong.
        """
        known, self._groups = self._groups, []
        source, groups = optimizer.state, optimizer.param_groups
        if known and (self._state is None or not self._state.is_in(source)):
            known = []
        found = []
        for group, last in itertools.zip_longest(groups, known[: len(groups)]):
            params = group["params"]
            if group.get("differentiable"):
                return None
            if last is None or not last.are_right(params):
                last = _found(params, source, slots)
                if last is None:
                    return None
            found.append(last)
        self._groups, self._source = found, source
        states: dict[torch.Tensor, RunState] = {}
        shown: list[dict[str, Any]] = []
        for group, runs_now in zip(groups, found, strict=True):
            runs_now.show(source)
            states.update(runs_now.states)
            lists = runs_now.batches if group.get("foreach") else [runs_now.flats]
            shown.extend({**group, "params": flats} for flats in lists)
        return shown, states


def _found(params: Sequence[Any], source: States, slots: frozenset[str]) -> GroupRuns | None:
    """Runs as of now; None where the parameters have to be stepped as DTensors."""
    if not set(map(type, params)) <= {UnevenDTensor}:
        return None
    runs = find_runs(params, source, slots)
    return None if runs is None else GroupRuns(params, runs)


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
