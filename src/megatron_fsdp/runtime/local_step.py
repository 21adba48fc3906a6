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
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, call, is_
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.runtime.flat_runs import Run, RunState, States, find_runs, lie_apart

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
        self._groups: list[_GroupRuns] = []
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
            for group in self._groups:
                group.release(source)

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
        source = optimizer.state
        found = []
        for group, last in itertools.zip_longest(optimizer.param_groups, known[: len(optimizer.param_groups)]):
            params = group["params"]
            if group.get("differentiable") or not set(map(type, params)) <= {UnevenDTensor}:
                return None
            if last is None or not last.are_right(params, source):
                runs = find_runs(params, source, slots)
                if runs is None:
                    return None
                last = _GroupRuns(params, runs)
            found.append(last)
        self._groups, self._source = found, source
        states: dict[torch.Tensor, RunState] = {}
        shown: list[dict[str, Any]] = []
        for group, runs_now in zip(optimizer.param_groups, found, strict=True):
            runs_now.show(source)
            states.update((run.flat, run.state) for run in runs_now.runs)
            shown.append({**group, "params": [run.flat for run in runs_now.runs]})
        return shown, states


class _GroupRuns:
    """The runs of a parameter group, and by what they are known to be right still in the next step.

    What is compared is held weakly, so that memory of gradients and state goes when nobody else wants it.

    Attributes:
        runs: As of the last look.
    """

    def __init__(self, params: Sequence[UnevenDTensor], runs: Sequence[Run]) -> None:
        self.runs = runs
        self._params = tuple(params)
        self._locals = tuple(map(_local_tensor, params))
        self._lie_apart = lie_apart(runs)  # other gradients could not make fewer of them
        self._has_grad: list[bool] = []
        self._seen_grads: list[Callable[[], object]] = []
        self._seen_state: list[Callable[[], object]] | None = None
        self._is_known = False  # everything is what was seen last

    def are_right(self, params: Sequence[UnevenDTensor], source: States) -> bool:
        """Whether parameters and state are the same objects as after the last step, and gradients lie as they did."""
        self._is_known = False
        if self._seen_state is None or len(params) != len(self._params):
            return False
        state, grads = _things_in(params, source), list(map(_grad, params))
        if not (
            all(map(is_, params, self._params))
            and all(map(is_, map(_local_tensor, params), self._locals))
            and len(state) == len(self._seen_state)
            and all(map(is_, state, map(call, self._seen_state)))
            and [grad is not None for grad in grads] == self._has_grad
            and all(run.is_as_left(source) for run in self.runs)
        ):
            return False
        self._is_known = all(map(is_, grads, map(call, self._seen_grads)))
        return self._is_known or (self._lie_apart and all(run.takes_gradients() for run in self.runs))

    def show(self, source: States) -> None:
        """Show gradients and state of now."""
        for run in self.runs:
            run.show(source)

    def level(self) -> None:
        """Let every member have made the step."""
        for run in self.runs:
            run.level()

    def release(self, source: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Leave state in the order of parameters, which all ranks share, and hold neither gradients nor state."""
        has_new_state = sum(run.release() for run in self.runs) > 0  # of all of them
        if has_new_state:
            for param in self._params:  # as without runs: people walk through states with a collective for each
                if param in source:
                    source[param] = source.pop(param)
        if not self._is_known or has_new_state:
            grads = list(map(_grad, self._params))
            self._has_grad = [grad is not None for grad in grads]
            self._seen_grads = list(map(_reference, grads))
            self._seen_state = list(map(_reference, _things_in(self._params, source)))


def _things_in(params: Sequence[UnevenDTensor], source: States) -> list[object]:
    """All that there is in the states of parameters; never None, which is what a dead reference gives."""
    things = [thing for param in params for thing in source.get(param, _NOTHING).values()]
    return [_NOTHING if thing is None else thing for thing in things]


def _reference(thing: object) -> Callable[[], object]:
    return weakref.ref(thing) if isinstance(thing, torch.Tensor) else lambda: thing


_NOTHING: dict[str, Any] = {}
_local_tensor = attrgetter("_local_tensor")
_grad = attrgetter("grad")


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
