"""Optimizer in backward: a thread steps offloaded units on the host, one by one, as their gradients become final.

    with optimizer.step_in_backward():   the thread steps a unit when its gradient is reduced and on the host
        loss.backward()
                                         the block ends with `optimizer.step()`: it waits for the thread, steps what is
                                         left, and installs the weights

Each parameter is stepped once, by the code of the optimizer's class on a view of its own (`local_step`), with the
options as of entering. So bits are those of a step after backward. Gradients, options and weights must not be changed
between backward and the end of the block: a change would come too late, and raises.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from megatron_fsdp.comm.agreement import raise_together
from megatron_fsdp.comm.collectives import reached
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.executor import OptimizerInBackward
from megatron_fsdp.engine.gradients import get_grads
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, ScheduleError, text_of
from megatron_fsdp.optim.local_step import LocalStep, LocalView, params_of

LOAD = (
    "some parameters are stepped already, which model.reset() does not undo: load a checkpoint of model and optimizer"
)


class StepInBackward(OptimizerInBackward):
    """One step in backward of a connected, elementwise optimizer, from entering to the optimizer's own `step`.

    Attributes:
        broken: The reason why the step cannot be finished; empty if it can.
    """

    def __init__(self, optimizer: Optimizer, step: LocalStep, engine: Engine) -> None:
        _check_groups(optimizer)
        _check_engine(engine)
        self._optimizer, self._step, self._engine = weakref.ref(optimizer), step, weakref.ref(engine)
        self._groups = [{**_options(group), "params": list(group["params"])} for group in optimizer.param_groups]
        self._group_of = {id(param): number for number, group in enumerate(self._groups) for param in group["params"]}
        self.stepped: set[int] = set()  # ids of the parameters that `step` leaves out
        self._views: list[LocalView] = []
        self._error: BaseException | None = None
        self._names = engine.sharded_names()
        self._used: dict[int, UnevenDTensor] = {}  # the gradient of each parameter that may not change any more
        self._versions: list[tuple[Tensor, int]] = []  # parameters, and the versions of their gradients
        self._weights: dict[UnevenDTensor, int] = {}  # what the thread steps, and its version before or after that
        self._changed: set[UnevenDTensor] = set()  # weights that somebody changed before the thread stepped them
        self.has_left = False
        self._pool = ThreadPoolExecutor(1, "step in backward")
        self._takes = step.has_stepped  # else nothing is stepped in this backward
        self._first_backward, self._is_open = engine.backward_number + 1, True
        self._taken: list[ParameterGroup] = []  # groups whose gradients were final, in their order
        self.broken = ""
        engine.executor.optimizer_in_backward = self

    # ---- in backward ------------------------------------------------------------------------------------------------

    def _take(self, group: ParameterGroup, on_host: Callable[[], None]) -> None:
        """Step a group on the thread."""
        optimizer = self._optimizer()
        own: list[Any] = [param for param in group.sharded if id(param) in self._group_of]
        if optimizer is None or not own:
            return
        self.stepped.update(map(id, own))
        self._forbid_changes(own)
        self._weights.update((param, param._local_tensor._version) for param in own)
        numbers = dict.fromkeys(self._group_of[id(param)] for param in own)
        parts = [
            {**self._groups[number], "params": [param for param in own if self._group_of[id(param)] == number]}
            for number in numbers
        ]
        self._views.append(self._step.part(optimizer, parts))
        self._pool.submit(self._run, self._views[-1], on_host)

    def _run(self, view: LocalView, on_host: Callable[[], None]) -> None:
        if self._error is not None:
            return  # the step has failed
        try:
            on_host()
            params = [param for group in view.shown_groups for param in group["params"]]
            self._changed.update(param for param in params if param._local_tensor._version != self._weights[param])
            own_step(view)(view)
            self._weights.update((param, param._local_tensor._version) for param in params)
        except BaseException as error:  # noqa: BLE001 - told on all ranks by `finish`
            self._error = error

    def _forbid_changes(self, params: Iterable[Tensor]) -> None:
        for param in params:
            grad = param.grad
            if isinstance(grad, UnevenDTensor):
                grad.used_for = self._names[id(param)]
                self._used[id(param)] = grad
                self._versions.append((param, grad._local_tensor._version))

    def leave(self) -> None:
        """End with the backward: from here on no gradient may change, also of parameters that are not stepped yet."""
        self.has_left = True
        self._is_open = False
        self._pool.shutdown(wait=False)  # the thread ends when it has stepped what it was given
        params = [param for group in self._groups for param in group["params"]]
        self._forbid_changes(param for param in params if id(param) not in self._used)

    def fail(self, error: BaseException) -> None:
        """End with a backward or step that has failed: wait for the thread, and note on the error if it has stepped."""
        self._is_open = False
        self._pool.shutdown(cancel_futures=True)
        self._stop(f"optimizer.step_in_backward() has failed ({text_of(error)})")
        if not self.broken:
            self.end()
        elif LOAD not in text_of(error):
            error.add_note(LOAD)

    # ---- in the step ------------------------------------------------------------------------------------------------

    def finish(self, optimizer: Optimizer, engine: Engine) -> None:
        """Wait for the thread, and agree with all ranks that none has failed; collective.

        Raises:
            ConfigurationError: Something inside of the block came too late.
            ScheduleError: The block has failed.
            RankError: A rank has met an error; raised on all.
        """
        self._pool.shutdown()
        error = self._error
        met: Exception | None = None
        if self.broken:
            met = ScheduleError(self.broken)
        elif error is not None:
            met = RuntimeError(f"{text_of(error)}; {LOAD}")
        elif problem := self._problem(optimizer):
            met = ConfigurationError(problem)
        raise_together(met, "a step in backward", engine.reaching_all)
        for view in self._views:
            view.hand_over()
        self._step.leaves_out = frozenset(self.stepped)
        self._step.check = partial(self._check, optimizer)

    def end(self) -> None:
        """Drop references to gradients and weights, when the step is done or a checkpoint is loaded."""
        self._pool.shutdown()
        for grad in self._used.values():
            grad.used_for = ""
        for kept in (self._used, self._versions, self._weights, self._changed, self._views, self._groups):
            kept.clear()
        self._detach()

    def _check(self, optimizer: Optimizer) -> None:
        """Recheck for changes after the user's step hooks."""
        problem = self._problem(optimizer)
        if problem:
            raise ConfigurationError(problem)

    def _problem(self, optimizer: Optimizer) -> str:
        """Describe a change since entering or backward; empty if there is none."""
        inside = (
            "inside of optimizer.step_in_backward(), or by a hook of the step, where parameters were stepped already"
        )
        groups = optimizer.param_groups
        same = len(groups) == len(self._groups) and all(map(_is_same_group, groups, self._groups))
        if not same:
            return f"param_groups of {type(optimizer).__name__} were changed {inside}; change them after the block"
        for param, version in self._versions:
            grad = self._used[id(param)]
            if param.grad is not grad or grad._local_tensor._version != version:
                return (
                    f"the gradient of {self._names[id(param)]} was changed {inside}; leave step_in_backward out; {LOAD}"
                )
        for weight, version in self._weights.items():
            if weight in self._changed or weight._local_tensor._version != version:
                return f"{self._names[id(weight)]} was changed {inside}; change weights after the block; {LOAD}"
        return ""

    @property
    def is_of_the_last_backward(self) -> bool:
        """True if the model has run no backward since this one."""
        engine = self._engine()
        return engine is not None and engine.backward_number == self._first_backward

    def _detach(self) -> None:
        """Detach from the executor, so that passes may begin: the step has ended, or has left no trace."""
        self._is_open = False
        engine = self._engine()
        if engine is not None and engine.executor.optimizer_in_backward is self:
            engine.executor.optimizer_in_backward = None

    def _stop(self, problem: str) -> None:
        """Stop; if a parameter was stepped, block passes until a checkpoint is loaded."""
        self._is_open = False
        if self._taken:
            self.broken = self.broken or f"{problem}; {LOAD}"
        else:
            self._detach()

    def reset(self) -> None:
        """Fail if the model is reset inside of the backward."""
        if self._is_open:
            self._stop("a backward was interrupted while an optimizer stepped in it")

    # ---- events of the engine ---------------------------------------------------------------------------------------

    def backward_begins(self, number: int) -> None:
        """Raise a ScheduleError on every rank, which names a parameter, for a second backward."""
        if self._is_open and number > self._first_backward:
            name = self._taken[0].names[0] if self._taken else "every parameter"
            raise self._too_late(name, "a second backward began inside optimizer.step_in_backward()")

    def unit_reduces(self, unit: Unit) -> None:
        """Raise a ScheduleError on every rank, which names a parameter, for gradients of a unit that was stepped."""
        for group in unit.groups:
            if group.gradients is not None and any(group is each for each in self._taken):
                name = next(itertools.compress(group.names, group.gradients.arrived), group.names[0])
                raise self._too_late(name, "a parameter is used where its unit's backward was over already")

    def _too_late(self, name: str, cause: str) -> ScheduleError:
        told = f"a gradient of {name} comes after the optimizer has used it in backward, since {cause}"
        self._stop(told)
        return ScheduleError(
            f"{told}; enter optimizer.step_in_backward() around the last backward of a step alone, or leave it out"
            + (f"; {LOAD}" if self._taken else "")
        )

    def unit_is_reduced(self, unit: Unit) -> None:
        """Attach the final gradients of a unit, and pass its groups to the optimizer."""
        engine = self._engine()
        if engine is None or not self._takes or not self._is_open:
            return
        for group in unit.groups:
            gradients = group.gradients
            if gradients is not None and self._is_final(engine, group):
                gradients.attach(group.sharded, [True] * len(group.sharded), group.describe_shard)
                self._taken.append(group)
                self._take(group, reached(engine.device))

    def _is_final(self, engine: Engine, group: ParameterGroup) -> bool:
        """Return True if the gradients of a group are final; the same on every rank."""
        gradients = group.gradients
        assert gradients is not None
        if not group.plan.offloads_main or gradients.is_busy or group.has_user_hooks:
            return False
        if gradients.shown_dtype != gradients.precision.main_grads or not all(group.trainable):
            return False  # they are cast, or some parameters have none, when backward ends
        shown = get_grads(group.sharded, gradients.grad_attribute)
        if any(grad is not None and grad is not own for grad, own in zip(shown, gradients.main.views, strict=True)):
            return False
        if not all(group.trained_since_attach):
            return False
        usage = engine.usage_of(group)
        return usage.is_known or (usage.is_alone and all(gradients.arrived))

    def check_forward(self, number: int) -> None:
        """Raise a ScheduleError for a forward after `number` backwards, unless the step's own backward is to come."""
        if self._is_open and number < self._first_backward:
            return
        raise ScheduleError(
            self.broken
            or "a forward began inside of optimizer.step_in_backward(), behind a backward; enter it around the last "
            "backward of a step alone"
        )


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer's class without torch's hooks, which run once per whole step."""
    found: Callable[..., Any] = type(optimizer).step
    while getattr(found, "hooked", False):
        found = found.__wrapped__  # type: ignore[attr-defined]
    return found


def _check_groups(optimizer: Optimizer) -> None:
    """Raise for groups that cannot be stepped in parts."""
    params = params_of(optimizer)
    if len(set(map(id, params))) < len(params) or any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot step in backward with differentiable=True, nor with a parameter that "
            "is listed twice; leave step_in_backward out"
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "params"}
    return tree_map_only(Tensor, Tensor.clone, options)


def _is_same_group(group: Mapping[str, Any], noted: Mapping[str, Any]) -> bool:
    if group.keys() != noted.keys() or list(map(id, group["params"])) != list(map(id, noted["params"])):
        return False
    return all(_is_same(value, noted[key]) for key, value in group.items() if key != "params")


def _is_same(value: Any, noted: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(noted, tuple | list):
        return len(value) == len(noted) and all(map(_is_same, value, noted))
    if isinstance(value, Tensor) or isinstance(noted, Tensor):
        return isinstance(value, Tensor) and isinstance(noted, Tensor) and torch.equal(value, noted)
    return bool(value == noted)


def _check_engine(engine: Engine) -> None:
    """Raise for a model of which no gradients would be final before the next backward ends."""
    if engine.executor.optimizer_in_backward is not None:
        raise ScheduleError(
            engine.executor.optimizer_in_backward.broken
            or "optimizer.step_in_backward() was entered before the step that another one began has ended; call "
            "optimizer.step() first"
        )
    trained = engine.groups_with_gradients()
    offloaded = [group for group, _ in trained if group.plan.offloads_main]
    casts = any(gradients.shown_dtype != gradients.precision.main_grads for _, gradients in trained)
    is_checked = any(check.stops_steps for check in engine.gradient_checks)
    asks = bool(offloaded) and all(engine.usage_of(group).never_knows for group in offloaded)
    for holds, reason in (
        (not offloaded, "main weights rest on the device"),
        (
            not engine.syncs,
            "the next backward does not reduce gradients (no_sync or the like): enter it for the last one",
        ),
        (is_checked, "gradients are checked when backward ends (report_nan_in_param_grad and its kin)"),
        (casts, "gradients are cast when backward ends, since main_grads_dtype is not main_params_dtype"),
        (asks, "ranks agree on used parameters when backward ends (find_unused_parameters, skipped units, experts)"),
    ):
        if holds:
            raise ConfigurationError(f"an optimizer cannot step in backward where {reason}; leave step_in_backward out")
