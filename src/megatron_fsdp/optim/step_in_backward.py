"""A step that begins in backward: a thread steps what rests on the host, unit by unit, as gradients become final.

    with optimizer.step_in_backward():   the thread steps a unit when its gradient is reduced and at home
        loss.backward()
    optimizer.step()                     waits for it, steps what is left, and installs the weights

Each parameter is stepped once, by the code of the optimizer's class on a view of its own (`local_step`), with the
options as of entering. So bits are those of a step after backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.early_steps import LOAD, EarlySteps, Take
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.optim.local_step import LocalStep, LocalView


class SteppedModel(Protocol):
    """The part of the wrapped model that a step in backward uses."""

    def sharded_names(self) -> Mapping[int, str]:
        """Return the canonical name of each sharded parameter by its id."""
        ...

    def step_early(self, take: Take | None) -> EarlySteps:
        """Give groups to an optimizer in the next backward, as their gradients become final."""
        ...

    def raise_together(self, error: Exception | None, doing: str) -> None:
        """Raise on all ranks what any of them has met."""


class StepInBackward:
    """One such step, from entering to the optimizer's own `step`.

    Args:
        optimizer: One of torch's elementwise ones, connected.
        step: How it steps.
        model: Its model.

    Attributes:
        stepped: Ids of the parameters that `step` leaves out.

    Raises:
        ConfigurationError: It cannot step in backward.
    """

    def __init__(self, optimizer: Optimizer, step: LocalStep, model: SteppedModel) -> None:
        _check_groups(optimizer)
        self._optimizer, self._step = weakref.ref(optimizer), step
        self._groups = [{**_options(group), "params": list(group["params"])} for group in optimizer.param_groups]
        self._group_of = {id(param): number for number, group in enumerate(self._groups) for param in group["params"]}
        self.stepped: set[int] = set()
        self._views: list[LocalView] = []
        self._error: BaseException | None = None
        self._names = model.sharded_names()
        self._used: dict[int, UnevenDTensor] = {}  # the gradient of each parameter that may not change any more
        self._versions: list[tuple[Tensor, int]] = []  # parameters, and the versions of their gradients
        self._pool = ThreadPoolExecutor(1, "step in backward")
        self._early = model.step_early(self._take if step.has_stepped else None)

    @property
    def broken(self) -> str:
        """Why the step cannot be finished; empty: it can."""
        return self._early.broken

    # ---- in backward ------------------------------------------------------------------------------------------------

    def _take(self, group: ParameterGroup, at_home: Callable[[], None]) -> None:
        """Step a group on the thread."""
        optimizer = self._optimizer()
        own = [param for param in group.sharded if id(param) in self._group_of]
        if optimizer is None or not own:
            return
        self.stepped.update(map(id, own))
        self._forbid_changes(own)
        numbers = dict.fromkeys(self._group_of[id(param)] for param in own)
        parts = [
            {**self._groups[number], "params": [param for param in own if self._group_of[id(param)] == number]}
            for number in numbers
        ]
        self._views.append(self._step.part(optimizer, parts))
        self._pool.submit(self._run, self._views[-1], at_home)

    def _run(self, view: LocalView, at_home: Callable[[], None]) -> None:
        if self._error is not None:
            return  # the step has failed
        try:
            at_home()
            own_step(view)(view)
        except BaseException as error:  # noqa: BLE001 - told on all ranks by `finish`
            self._error = error

    def _forbid_changes(self, params: Iterable[Tensor]) -> None:
        for param in params:
            grad = param.grad
            if isinstance(grad, UnevenDTensor):
                grad.used_for = self._names[id(param)]
                self._used[id(param)] = grad

    def leave(self) -> None:
        """End with the backward: from here on nothing may change gradients, also of what is not stepped yet."""
        self._early.close()
        self._pool.shutdown(wait=False)  # the thread ends when it has stepped what it was given
        params = [param for group in self._groups for param in group["params"]]
        self._forbid_changes(param for param in params if id(param) not in self._used)
        self._versions = [
            (param, self._used[id(param)]._local_tensor._version) for param in params if id(param) in self._used
        ]

    def fail(self, error: BaseException) -> None:
        """End with a backward that has failed: wait for the thread, and say what has become of parameters."""
        self._early.close()
        self._pool.shutdown(cancel_futures=True)
        self._early.fail(
            f"the backward inside optimizer.step_in_backward() has failed ({type(error).__name__}: {error})"
        )
        if self.broken:
            error.add_note(LOAD)

    # ---- in the step ------------------------------------------------------------------------------------------------

    def finish(self, optimizer: Optimizer, model: SteppedModel, has_closure: bool) -> None:
        """Wait for the thread, and let ranks agree that everything went well; collective.

        Raises:
            ConfigurationError: Something between backward and step comes too late.
            ScheduleError: The backward has failed.
            RankError: A rank has met an error; told on all.
        """
        if self.broken:
            raise ScheduleError(self.broken)
        self._pool.shutdown()
        error = self._error
        if error is not None:
            self._early.fail(f"a step in backward has failed ({type(error).__name__}: {error})")
        problem = self._problem(optimizer, has_closure) if error is None else ""
        met: Exception | None = ConfigurationError(problem) if problem else None
        if error is not None:
            met = RuntimeError(f"{type(error).__name__}: {error}; {LOAD}")
        try:
            model.raise_together(met, "a step in backward")
        except Exception as told:
            if told is not met:  # some ranks alone have met it
                self._early.fail(str(told))
            raise
        for view in self._views:
            view.hand_over()
        self.end()

    def end(self) -> None:
        """Let go of gradients and of the model, when the step is done or a checkpoint is loaded."""
        self._pool.shutdown()
        for grad in self._used.values():
            grad.used_for = ""
        self._used.clear()
        self._versions.clear()
        self._early.end()

    def _problem(self, optimizer: Optimizer, has_closure: bool) -> str:
        """Say what was changed since backward; empty: nothing."""
        if has_closure:
            return "optimizer.step(closure) cannot follow optimizer.step_in_backward(); call step() without a closure"
        if getattr(optimizer, "grad_scale", None) is not None:
            return (
                "a scaler cannot unscale gradients after optimizer.step_in_backward() has used them; leave "
                "step_in_backward out, or train in bfloat16, which needs no scaler"
            )
        groups = optimizer.param_groups
        same = len(groups) == len(self._groups) and all(map(_is_same_group, groups, self._groups))
        if not same:
            return (
                f"param_groups of {type(optimizer).__name__} were changed between optimizer.step_in_backward() and "
                "optimizer.step(), where parameters were stepped already; change them after step()"
            )
        for param, version in self._versions:
            grad = self._used[id(param)]
            if param.grad is not grad or grad._local_tensor._version != version:
                return (
                    f"the gradient of {self._names[id(param)]} was changed between optimizer.step_in_backward() and "
                    f"optimizer.step(), which comes too late; leave step_in_backward out; {LOAD}"
                )
        return ""


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer's class without torch's hooks, which see one step in all."""
    found: Callable[..., Any] = type(optimizer).step
    while getattr(found, "hooked", False):
        found = found.__wrapped__  # type: ignore[attr-defined]
    return found


def _check_groups(optimizer: Optimizer) -> None:
    """Refuse groups that cannot be stepped in parts.

    Raises:
        ConfigurationError: Says why.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(set(map(id, params))) < len(params) or any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot step in backward with differentiable=True, nor with a parameter that "
            "is listed twice; leave step_in_backward out"
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}


def _is_same_group(group: Mapping[str, Any], noted: Mapping[str, Any]) -> bool:
    if group.keys() != noted.keys() or list(map(id, group["params"])) != list(map(id, noted["params"])):
        return False
    return all(_is_same(value, noted[key]) for key, value in group.items() if key != "params")


def _is_same(value: Any, noted: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(noted, Tensor):
        return isinstance(value, Tensor) and isinstance(noted, Tensor) and torch.equal(value, noted)
    return bool(value == noted)
