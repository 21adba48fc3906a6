"""Gradients that an optimizer uses while backward goes on, unit by unit, once they are final and at home."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_fsdp.comm.lanes import reached
from megatron_fsdp.engine.gradients import get_grads
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import ConfigurationError, ScheduleError

if TYPE_CHECKING:
    from megatron_fsdp.engine.engine import Engine

LOAD = (
    "some parameters are stepped already, which model.reset() does not undo: load a checkpoint of model and optimizer"
)

Take = Callable[[ParameterGroup, Callable[[], None]], None]
"""Called with a group whose final gradients are shown, and with what blocks the host until it may read them."""


def begin_early_steps(engine: Engine, take: Take | None) -> EarlySteps:
    """Give groups to an optimizer in the next backward.

    Raises:
        ConfigurationError: None of them would be final before backward ends.
        ScheduleError: An optimizer steps in backward already.
    """
    if engine.executor.early is not None:
        raise ScheduleError(
            engine.executor.early.broken
            or "optimizer.step_in_backward() was entered before the step that another one began has ended; call "
            "optimizer.step() first"
        )
    trained = engine.groups_with_gradients()
    away = [group for group, _ in trained if group.plan.main_home.is_away]
    casts = any(gradients.shown_dtype != gradients.precision.main_grads for _, gradients in trained)
    is_checked = any(check.stops_steps for check in engine.gradient_checks)
    asks = bool(away) and all(engine.usage_of(group).never_knows for group in away)
    for holds, lack in (
        (not away, "main weights rest on the device"),
        (
            not engine.mode.syncs,
            "the next backward does not reduce gradients (no_sync or the like): enter it for the last one",
        ),
        (is_checked, "gradients are checked when backward ends (report_nan_in_param_grad and its kin)"),
        (casts, "gradients are cast when backward ends, since main_grads_dtype is not main_params_dtype"),
        (asks, "ranks ask each other when backward ends which parameters were used (find_unused_parameters, experts)"),
    ):
        if holds:
            raise ConfigurationError(f"an optimizer cannot step in backward where {lack}; leave step_in_backward out")
    return EarlySteps(engine, take)


class EarlySteps:
    """Gives the groups of one backward to an optimizer; lives until the optimizer's step has ended.

    Args:
        engine: Of the model.
        take: Steps a group; None: nothing is stepped in this backward.

    Attributes:
        stepped: What was given to `take`.
        broken: Why the step cannot be finished; empty: it can.
    """

    def __init__(self, engine: Engine, take: Take | None) -> None:
        self._engine, self._take = weakref.ref(engine), take
        self._first_backward = engine.backward_number + 1
        self._is_open = True
        self.stepped: list[ParameterGroup] = []
        self.broken = ""
        engine.executor.early = self

    @property
    def is_of_the_last_backward(self) -> bool:
        """Whether the model has run no backward since this one."""
        engine = self._engine()
        return engine is not None and engine.backward_number == self._first_backward

    def close(self) -> None:
        """Give no group to the optimizer any more: backward is over."""
        self._is_open = False

    def end(self) -> None:
        """Let the model go on: the step has ended, or nothing of it is left."""
        self.close()
        engine = self._engine()
        if engine is not None and engine.executor.early is self:
            engine.executor.early = None

    def fail(self, problem: str) -> None:
        """Stop; where a parameter was stepped, nothing goes on until a checkpoint is loaded."""
        self.close()
        if self.stepped:
            self.broken = self.broken or f"{problem}; {LOAD}"
        else:
            self.end()

    def reset(self) -> None:
        """Stop where the model is reset inside of the backward."""
        if self._is_open:
            self.fail("a backward was interrupted while an optimizer stepped in it")

    # ---- what the engine tells --------------------------------------------------------------------------------------

    def backward_begins(self, number: int) -> None:
        """Refuse a second backward.

        Raises:
            ScheduleError: On every rank; names a parameter.
        """
        if self._is_open and number > self._first_backward:
            name = self.stepped[0].names[0] if self.stepped else "every parameter"
            raise self._too_late(name, "a second backward began inside optimizer.step_in_backward()")

    def unit_reduces(self, unit: Unit) -> None:
        """Refuse gradients of a unit that was stepped.

        Raises:
            ScheduleError: On every rank; names a parameter.
        """
        for group in unit.groups:
            if group.gradients is not None and any(group is each for each in self.stepped):
                arrived = zip(group.names, group.gradients.of_parameter, strict=True)
                name = next((name for name, each in arrived if each.arrived), group.names[0])
                raise self._too_late(name, "a parameter is used where its unit's backward was over already")

    def _too_late(self, name: str, cause: str) -> ScheduleError:
        told = f"a gradient of {name} comes after the optimizer has used it in backward, since {cause}"
        self.fail(told)
        return ScheduleError(
            f"{told}; enter optimizer.step_in_backward() around the last backward of a step alone, or leave it out"
            + (f"; {LOAD}" if self.stepped else "")
        )

    def unit_is_reduced(self, unit: Unit) -> None:
        """Show the gradients of a unit that are final, and give its groups to the optimizer."""
        engine = self._engine()
        if engine is None or self._take is None or not self._is_open:
            return
        for group in unit.groups:
            gradients = group.gradients
            if gradients is not None and self._is_final(engine, group):
                gradients.attach(group.sharded, [True] * len(group.sharded), group.describe_piece)
                self.stepped.append(group)
                self._take(group, reached(engine.device))

    def _is_final(self, engine: Engine, group: ParameterGroup) -> bool:
        """Return whether nothing can change the gradients of a group, but what is refused; the same on every rank."""
        gradients = group.gradients
        assert gradients is not None
        if not group.plan.main_home.is_away or gradients.is_busy or group.has_user_hooks:
            return False
        if gradients.shown_dtype != gradients.precision.main_grads or not all(group.trainable):
            return False  # they are cast, or some parameters have none, when backward ends
        shown = get_grads(group.sharded, gradients.grad_attribute)
        if any(grad is not None and grad is not own for grad, own in zip(shown, gradients.main.views, strict=True)):
            return False
        if not all(group.trained_since_attach):
            return False
        usage = engine.usage_of(group)
        return usage.is_known or (usage.is_alone and all(each.arrived for each in gradients.of_parameter))

    def check_forward(self, number: int) -> None:
        """Refuse a forward before the step has ended, after so many backwards of the model.

        Raises:
            ScheduleError: On every rank.
        """
        if self._is_open and number < self._first_backward:
            return
        raise ScheduleError(
            self.broken
            or "a forward began inside of optimizer.step_in_backward(), behind a backward; enter it around the last "
            "backward of a step alone"
        )
