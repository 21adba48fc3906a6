"""The runs of one parameter group of an optimizer, kept from step to step for as long as they are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.runtime.flat_runs import Run, RunState, lie_apart
from megatron_fsdp.runtime.same_objects import SameObjects
from megatron_fsdp.unit.grad_slot import GRAD, get_grads

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
