"""Let torch's elementwise optimizers step on flat local tensors, without a detour through DTensor for each operation.

During `step` the code of the optimizer's class works on a stand-in: an object of the same kind that shares every
attribute with the optimizer but shows this rank's shards as parameters, joined to runs (`flat_runs`), with their
gradients and their state. The optimizer itself, which hooks, closures, schedulers and checkpoints hold, has its
DTensors throughout, so there is nothing to restore, whatever happens inside. (Hooks get the stand-in as `args[0]`; one
that returns the optimizer there instead has that step run on DTensors.)

    optimizer.param_groups[i]["params"][j]   a DTensor      stand-in: part of a plain tensor over the same memory
    optimizer.state[param]["exp_avg"]        a DTensor      stand-in: part of a plain tensor; wrapped part by part
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.runtime.flat_runs import RunState, States, find_runs
from megatron_fsdp.runtime.group_runs import GroupRuns
from megatron_fsdp.runtime.same_objects import SameState

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
