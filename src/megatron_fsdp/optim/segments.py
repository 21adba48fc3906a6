"""Joins neighbouring small shards to segments, each of which an elementwise optimizer steps as one tensor.

Each tensor costs host time in a step. Shards that follow one another in a flat buffer, as their gradients do, are a
segment of that buffer, and the step gets the segment instead of them:

    optimizer.param_groups[i]["params"]    a.weight | a.bias | b.weight      the step gets one tensor (elements,)
    optimizer.state[param]["exp_avg"]      views of one tensor (elements,)
    optimizer.state[param]["step"]         elements of one tensor (members,): each may be changed by itself

States are joined once: when the step makes them, or at the first step after they were loaded or replaced.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_fsdp.comm.collectives import address_of, has_values, is_capturing
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.gradients import GRAD
from megatron_fsdp.engine.param_group import ParameterGroup

State = dict[str, Any]

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""Keys under which torch's optimizers keep one number for each parameter; other numbers are the user's own."""


class Segment:
    """Shows neighbouring shards of a parameter group to an optimizer as one tensor, with one state.

    `params` are the members, from `index` on in their group; `local` their plain tensors, whose states are in `states`.
    """

    def __init__(
        self,
        group: ParameterGroup,
        index: int,
        params: Sequence[UnevenDTensor],
        local: Sequence[Tensor],
        states: dict[Tensor, State],
    ) -> None:
        self.params, self.local, self._states = params, local, states
        self._group, self._index = weakref.ref(group), index
        self._cuts = list(pairwise((0, *accumulate(each.numel() for each in local))))
        self._first = next(position for position, each in enumerate(local) if each.numel())
        self.whole = self._join(local)
        self.state: State = {}
        self._others = [each for each in local if each is not local[self._first]]
        self._shared: State = {}  # the values of `state` of which members have their parts
        self._numbers: dict[str, Tensor] = {}  # by key, the members' numbers (members,)
        self._versions: dict[str, tuple[int, int]] = {}  # by key, of the members' numbers and of the whole's
        self._whole_version = self.whole._version
        self._has_differed = False  # members were found with different numbers

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return parts that follow one another in memory as one view (elements,)."""
        return parts[self._first].as_strided((self._cuts[-1][1],), (1,))

    # ---- what a step gets ---------------------------------------------------------------------------------------

    def try_to_show(self, grads: Sequence[Tensor | None]) -> bool:
        """Set the gradient of the whole; return False if the members have to be stepped one by one."""
        group = self._group()
        if group is None or group.gradients is None or self._has_differed:
            return False
        views = group.gradients.main.views[self._index : self._index + len(grads)]
        if not all(map(operator.is_, grads, views)) or type(None) in map(type, grads):
            return False
        for key, numbers in self._numbers.items():
            if numbers._version != self._versions[key][0]:
                if not _are_equal(numbers):
                    self._has_differed = True
                    return False
                self._note_versions(key)
        self.whole.grad = self._join([view._local_tensor for view in views])  # type: ignore[union-attr]
        self._whole_version = self.whole._version
        return True

    @property
    def lacks_state(self) -> bool:
        """True if a member has made state by itself."""
        return not self.state and any(self._states[each] for each in self.local)

    # ---- state --------------------------------------------------------------------------------------------------

    def try_to_join_states(self, sharded: frozenset[str]) -> bool:
        """Make the members' states views of one; return False, and change nothing, if they differ in kind or number.

        `sharded`: keys of states that are shaped as the parameter.
        """
        of_each = [self._states[local] for local in self.local]
        if any(state.keys() != of_each[0].keys() for state in of_each):
            return False
        joined: State = {}
        for key in of_each[0]:
            values: list[Tensor] = [state[key] for state in of_each]
            kinds = {(value.dtype, value.device) if type(value) is Tensor else None for value in values}
            if len(kinds) > 1 or None in kinds:
                return False
            if key in sharded:
                joined[key] = self._join(values) if _follow(values) else torch.cat([one.flatten() for one in values])
            elif key not in _NUMBERS or any(value.dim() for value in values) or is_capturing(values[0].device):
                return False
            else:
                base = _base_of(values)
                joined[key] = torch.stack(values) if base is None else base
                if not _are_equal(joined[key]):
                    return False
        for key, value in joined.items():
            self._share(key, value, is_number=key not in sharded)
        self._states[self.whole] = self.state
        return True

    def share_states(self) -> None:
        """Give the members their parts of states that a step has made, and the numbers that it has counted."""
        if self.whole._version != self._whole_version:
            increment_version(self._others)  # by which writes are noticed; the first one's is the whole's
        for key, value in list(self.state.items()):
            if self._shared.get(key) is not value:
                # In a simulated rank members share the number that torch has made: copies would have no value to read.
                is_number = isinstance(value, Tensor) and not value.dim() and has_values(value)
                self._share(key, value.detach().expand(len(self.local)).clone() if is_number else value, is_number)
            elif key in self._numbers:
                self._count(key)

    def _count(self, key: str) -> None:
        numbers, own = self._numbers[key], self.state[key]
        seen, own_seen = self._versions[key]
        if own._version != own_seen and numbers._version == seen:  # else the program has written to them
            numbers[1:].copy_(own)
            self._note_versions(key)

    def _note_versions(self, key: str) -> None:
        self._versions[key] = self._numbers[key]._version, self.state[key]._version

    def _share(self, key: str, value: Any, is_number: bool) -> None:
        parts: list[Any] = [value] * len(self.local)
        if is_number:
            parts = [value[position] for position in range(len(parts))]
            self._numbers[key], value = value, parts[0].data  # whose version counter is its own
        elif isinstance(value, Tensor) and value.dim():
            cuts = zip(self._cuts, self.local, strict=True)
            parts = [value[start:stop].view_as(each) for (start, stop), each in cuts]
        self.state[key] = self._shared[key] = value
        if is_number:
            self._note_versions(key)
        for local, part in zip(self.local, parts, strict=True):
            self._states[local][key] = part


# ---- finding them ----------------------------------------------------------------------------------------------------


def find_segments(
    params: Sequence[UnevenDTensor], local: Sequence[Tensor], states: dict[Tensor, State]
) -> Iterator[tuple[slice, Segment | None]]:
    """Cut an optimizer's parameters, in order, into segments and parameters that are stepped one by one."""
    first = 0
    for group, places in groupby(map(_place_of, params), key=itemgetter(0)):
        indexes = [index for _, index in places]
        for cut in _cuts_of(group, indexes):
            members = slice(first + cut.start, first + cut.stop)
            shards = local[members]
            if group is not None and len(shards) > 1 and any(each.numel() for each in shards) and _follow(shards):
                yield members, Segment(group, indexes[cut.start], params[members], shards, states)
            else:
                yield members, None
        first += len(indexes)


def _place_of(param: UnevenDTensor) -> tuple[ParameterGroup | None, int]:
    """Return the group and index of a parameter; no group for one that is not, or no longer, a model's."""
    reference = getattr(param, "_fsdp_engine", None)
    engine = None if reference is None else reference()
    return (None, 0) if engine is None else engine.group_and_index.get(id(param), (None, 0))


def _cuts_of(group: ParameterGroup | None, indexes: Sequence[int]) -> list[slice]:
    """Cut parameters of a group where segments begin; one by one if the step gets no views of the main gradient."""
    if group is not None and group.gradients is not None and group.grad_attribute == GRAD:
        main = group.weights.main
        if group.gradients.main.dtype == main.local.dtype:
            return main.layout.segments_in(main.region, indexes, main.local.itemsize)
    return [slice(position, position + 1) for position in range(len(indexes))]


def _follow(parts: Sequence[Tensor]) -> bool:
    """Return True if tensors follow one another in one memory."""
    filled = [part for part in parts if part.numel()]
    return all(each.is_contiguous() for each in filled) and all(
        address_of(part) + part.nbytes == address_of(following)
        and part.untyped_storage()._cdata == following.untyped_storage()._cdata
        for part, following in pairwise(filled)
    )


def _base_of(numbers: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor (members,) of which numbers are elements; None if they are not, as after a load from a file."""
    base = numbers[0]._base
    is_one = base is not None and base.shape == (len(numbers),) and all(each._base is base for each in numbers)
    return base if is_one else None


def _are_equal(numbers: Tensor) -> bool:
    return bool((numbers == numbers[0]).all())
