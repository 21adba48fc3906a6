"""A training step on paper: the engine's scheduler and executor, driven by the events of a compute profile.

The executor works on units that have no memory (`stand_ins`) and on a simulated clock, so what comes out are the
collectives of a step in their order, when the compute side waits for them, and what memory is held at each event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from megatron_fsdp.engine.executor import Executor
from megatron_fsdp.engine.schedule import Action, Operation, Reach, Scheduler, SyncMode
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Segment
from megatron_fsdp.plan.planned_model import PlannedModel
from megatron_fsdp.plan.stand_ins import PassingMemory, PlannedUnitDriver
from megatron_fsdp.plan.wires import Cost, Transfer, Wires

ComputeTime = Callable[[Segment], float]
"""Seconds that the operators of a segment take."""


@dataclass(frozen=True)
class Moment:
    """What one rank holds at one time of a step, beside what it holds at all times.

    Attributes:
        time_s: Since the step began.
        label: What happens, such as `F3>`, or `step` for the optimizer.
        activation_bytes: As the profile says.
        gathered_bytes: Memory for gathered weights.
        bucket_bytes: Communication buckets and scratch.
        gradient_bytes: Main gradients of the units that were reduced since gradients were cleared.
        passing_bytes: Tensors of reductions on their way, gradients cast for the optimizer, what its step borrows.
    """

    time_s: float
    label: str
    activation_bytes: int
    gathered_bytes: int
    bucket_bytes: int
    gradient_bytes: int
    passing_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        borrowed = self.gathered_bytes + self.bucket_bytes
        return self.activation_bytes + borrowed + self.gradient_bytes + self.passing_bytes


@dataclass(frozen=True)
class ReplayedStep:
    """One step in the steady state.

    Attributes:
        moments: In order of time.
        transfers: All collectives, in order of their start; times since the step began.
        seconds: From the first event to the end of the optimizer's step.
        exposed_s: Of these, waiting for collectives.
        operations: What the scheduler decided in the last microbatch, in compact form.
        borrowed_bytes: The most that gathered weights, buckets and scratch took, each at a time.
    """

    moments: tuple[Moment, ...]
    transfers: tuple[Transfer, ...]
    seconds: float
    exposed_s: float
    operations: tuple[str, ...]
    borrowed_bytes: int

    @property
    def peak(self) -> Moment:
        """When most is held; the first of equals."""
        return max(self.moments, key=lambda moment: moment.total_bytes)


@dataclass(frozen=True)
class StepCosts:
    """What things take.

    Attributes:
        transfer: Of a collective.
        compute: Of a segment.
        optimizer_s: Of the optimizer's step and of installing the new weights.
        cast_gradient_bytes: Gradients in another dtype than they are accumulated in, from the sync to the next step.
        optimizer_bytes: What the optimizer's step borrows.
        saved_microbatches: Microbatches whose activations are alive besides those of the one that runs.
    """

    transfer: Cost
    compute: ComputeTime
    optimizer_s: float = 0.0
    cast_gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved_microbatches: int = 0


def replay_step(model: PlannedModel, profile: ComputeProfile, costs: StepCosts) -> ReplayedStep:
    """Replay two steps and describe the second, whose order of units is known and whose memory is all taken.

    Args:
        model: The units; those of the profile have the same names.
        profile: One microbatch.
        costs: Times and sizes that neither of them knows.
    """
    replay = _Replay(model, costs)
    replay.step(profile)
    replay.begin_recording()
    replay.step(profile)
    return replay.recorded()


class _Replay:
    """The engine's loop around scheduler and executor, with stand-ins."""

    def __init__(self, model: PlannedModel, costs: StepCosts) -> None:
        setup = model.setup
        self._setup = setup
        self._costs = costs
        self._wires = Wires(costs.transfer)
        self._passing = PassingMemory()
        self._units = tuple(
            PlannedUnitDriver(index, unit.name or "(root)", unit.groups, self._wires, setup.backend, self._passing)
            for index, unit in enumerate(model.units)
        )
        self._gradients = [
            group.gradients for unit in self._units for group in unit.groups if group.gradients is not None
        ]
        self._index = {unit.name: index for index, unit in enumerate(model.units)}
        self._owners = {
            info.name: (index, position)
            for index, unit in enumerate(model.units)
            for position, group in enumerate(unit.groups)
            for info in group.spec.parameters
        }
        self._scheduler = Scheduler(model.memory.schedule)
        self._executor = Executor(
            cast(Any, self._units), torch.device("meta"), self._finalise, model.memory.weights, model.memory.buckets
        )
        self._mode = SyncMode()
        self._pending_is_sharded = setup.strategy >= 2
        self._epochs: dict[int, list[int]] = {}
        self._moments: list[Moment] = []
        self._operations: list[str] = []
        self._began_s = self._began_exposed_s = 0.0
        self._first_transfer = 0
        self._cast_bytes = 0

    # ---- what is recorded ---------------------------------------------------------------------------------------

    def begin_recording(self) -> None:
        """Forget what was recorded so far."""
        self._moments.clear()
        self._first_transfer = len(self._wires.transfers)
        self._began_s, self._began_exposed_s = self._wires.now_s, self._wires.exposed_s

    def recorded(self) -> ReplayedStep:
        """What was recorded since."""
        shifted = [
            Transfer(t.wire, t.purpose, t.unit, t.sent_bytes, t.start_s - self._began_s, t.end_s - self._began_s)
            for t in self._wires.transfers[self._first_transfer :]
        ]
        return ReplayedStep(
            tuple(self._moments),
            tuple(shifted),
            self._wires.now_s - self._began_s,
            self._wires.exposed_s - self._began_exposed_s,
            tuple(self._operations),
            self._executor.transient_bytes,
        )

    def _note(self, label: str, activation_bytes: int, passing_bytes: int) -> None:
        held = self._executor.weight_memory.held_bytes
        self._moments.append(
            Moment(
                self._wires.now_s - self._began_s,
                label,
                activation_bytes,
                held,
                self._executor.bucket_bytes,
                sum(gradients.main_bytes for gradients in self._gradients),
                passing_bytes + self._cast_bytes,
            )
        )

    # ---- a step -------------------------------------------------------------------------------------------------

    def step(self, profile: ComputeProfile) -> None:
        """All microbatches and the optimizer."""
        self._cast_bytes = 0
        for gradients in self._gradients:
            gradients.has_main = False
        for microbatch in range(self._setup.microbatches):
            is_last = microbatch == self._setup.microbatches - 1
            self._mode = self._setup.mode(is_last)
            self._operations.clear()
            self._microbatch(profile)
        self._passing.take(self._costs.optimizer_bytes)
        self._note("step", 0, self._passing.peak_bytes)
        self._wires.compute(self._costs.optimizer_s)
        self._passing.give_back(self._costs.optimizer_bytes)
        self._passing.forget_peak()
        self._note("stepped", 0, self._passing.now_bytes)
        self._run(self._scheduler.weights_changed())
        for unit in self._units:
            unit.wait_for_outer()
            unit.is_behind = True

    def _microbatch(self, profile: ComputeProfile) -> None:
        saved_bytes = profile.kept_bytes * self._costs.saved_microbatches
        for segment in profile.segments:
            self._passing.forget_peak()
            self._event(segment, self._index[profile.unit_names[segment.unit]])
            self._note(str(segment), segment.begin_bytes + saved_bytes, self._passing.peak_bytes)
            self._passing.forget_peak()
            self._wires.compute(self._costs.compute(segment))
            self._arrive(segment.gradients)
            if segment.peak_bytes > segment.begin_bytes:
                self._note(f"{segment}+", segment.peak_bytes + saved_bytes, self._passing.peak_bytes)

    def _event(self, segment: Segment, unit: int) -> None:
        if segment.event is Event.FORWARD_BEGINS:
            self._forward_begins(unit)
        elif segment.event is Event.FORWARD_ENDS:
            self._epochs.setdefault(unit, []).append(self._scheduler.forward_ends(unit, needs_backward=True))
            if not self._scheduler.in_forward and not self._scheduler.in_backward:
                self._executor.wait_for_outer()
        elif segment.event is Event.BACKWARD_BEGINS:
            epoch = self._epochs[unit][-1]
            self._run(self._scheduler.backward_begins(unit, epoch))
        elif segment.event is Event.BACKWARD_ENDS:
            self._run(self._scheduler.backward_ends())

    def _forward_begins(self, unit: int) -> None:
        if not self._scheduler.in_forward and not self._scheduler.in_backward:
            self._executor.all_gather_outer()
        self._run(self._scheduler.forward_begins(unit))

    def _arrive(self, names: Iterable[str]) -> None:
        for name in names:
            unit, position = self._owners[name]
            driver = self._units[unit]
            gradients = driver.groups[position].gradients
            if gradients is not None and not gradients.is_filling:
                self._scheduler.gradient_arrives(unit)
                self._executor.begin_filling(cast(Any, driver), position, self._reach)

    @property
    def _reach(self) -> Reach:
        return self._mode.reach(self._pending_is_sharded)

    def _run(self, operations: Iterable[Operation]) -> None:
        done = tuple(operations)
        self._operations += map(str, done)
        self._executor.run(done, self._reach)

    def _finalise(self) -> None:
        """What the wrapper does at the end of a backward: the sync, where it is time for one."""
        if not self._mode.syncs:
            return
        for unit in reversed(self._units):
            if any(group.gradients is not None and group.gradients.has_deferred for group in unit.groups):
                self._executor.run((Operation(Action.REDUCE, unit.index),))
            else:
                self._executor.reduce_outer(cast(Any, unit))
        self._executor.retire_all()
        self._cast_bytes = self._costs.cast_gradient_bytes
