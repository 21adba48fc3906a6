"""Runs: parameters that lie side by side in memory, with their gradients, seen by an optimizer as one flat tensor.

What an elementwise optimizer does costs a few calls per tensor, so a hundred small parameters of a unit, which share
one flat buffer, are a hundred times cheaper as one. State that the optimizer makes for a run is one flat tensor too;
in the optimizer's own state each parameter has its part of that, a DTensor like the parameter, and its own number of
steps. Nobody who looks at the optimizer sees runs.

    members     a.weight | a.bias | b.weight        DTensors, state a view each of the run's
    run         [------- one tensor --------]       state one tensor
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp.buffer.real_values import address_of, has_values
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.dtensor.tensor import UnevenDTensor

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
