"""Watching a model run: who wants to know is told of every phase of every unit, and of every collective.

Timelines, logs of what a hanging rank did last and checks of buffers are all observers. Without one, a phase costs the
test of a truth value. Observers see what happens on this rank, in order, and change nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

import torch.distributed as dist

from megatron_fsdp.comm.lanes import Moment
from megatron_fsdp.engine.memory import Block
from megatron_fsdp.engine.schedule import Action


class Phase(Enum):
    """What is happening on this rank's host. Phases nest: a forward inside a backward is a recomputation."""

    GATHER = "gather"  # starting the gather of a unit's weights
    WAIT = "wait"  # waiting for them
    RELEASE = "release"  # letting go of them
    REDUCE = "reduce"  # starting the reduction of a unit's gradients
    FINALISE = "finalise"  # the backward is over: waiting for all reductions, showing gradients
    GATHER_ACROSS = "gather across"  # starting a gather over the outer axis
    REDUCE_ACROSS = "reduce across"  # starting a reduction over the outer axis
    RETIRE = "retire"  # waiting for a reduction, because its memory is needed or the backward ends
    FORWARD = "forward"  # the unit's module computes
    BACKWARD = "backward"  # the unit's backward computes, until that of another unit begins or the backward ends
    COPY = "copy"  # a gradient goes into its bucket
    INSTALL = "install"  # main weights go into compute weights; a step is what lies between two of these
    AGREE = "agree"  # comparing notes with the other ranks: used parameters, checks of gradients, arguments
    NORM = "norm"  # the norm of all gradients
    WHOLE = "whole tensors"  # putting whole tensors together, or handing them out, outside of forward and backward


class Memory(Enum):
    """A kind of borrowed memory; the value is its name in messages."""

    WEIGHTS = "gathered weights"
    BUCKET = "communication bucket"
    SCRATCH = "scratch of a reduction"


PHASE_OF: dict[Action, Phase] = {action: Phase(action.value) for action in Action}


class Observer:
    """What is told; each method does nothing unless a subclass says what. What one raises ends the training step."""

    def begins(self, phase: Phase, unit: int) -> None:
        """A phase of a unit begins; for phases of the whole model the unit is the root, 0."""

    def ends(self, phase: Phase, unit: int) -> None:
        """It is over. Not told where an exception ended it."""

    def lends(self, memory: Memory, unit: int, block: Block) -> None:
        """A unit gets memory for its weights or gradients; for weights this is told inside of its gather."""

    def takes_back(self, memory: Memory, unit: int, block: Block) -> None:
        """A bucket or scratch is free again, after the reduction was waited for. Weights are released instead."""

    def forgets(self) -> None:
        """A pass was broken off by an exception, and the model is brought to rest: no phase is under way."""

    def communicates(self, number: int, moment: Moment, lane: str, work: dist.Work | None) -> None:
        """A collective, counted from 0 on this rank and for this model, has come to a moment of its life.

        Launch and completion of one collective are told inside of different phases: that of its launch says which unit
        and what it is for.

        Args:
            number: Which one.
            moment: How far it is.
            lane: "gather", "reduce" or "outer".
            work: Its handle where it was just launched, if the back end gave one.
        """

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:
        """An exception has ended a phase; the phases inside of it end untold."""

    def explains(self) -> str:
        """What it knows about why communication has just failed; empty: nothing."""
        return ""


class Observers:
    """The observers of one model, as one. False where there are none.

    Attributes:
        steps: How often weights have been installed while somebody watched.
        are_there: The same as the truth of this object, for code that asks for every gradient.
    """

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()
        self.are_there = False
        self._next = 0
        self._computing: list[int] = []  # the unit whose backward computes, if any
        self.steps = 0

    def __bool__(self) -> bool:
        return self.are_there

    def add(self, observer: Observer) -> None:
        """Tell another one from now on."""
        self._all = (*self._all, observer)
        self.are_there = True

    def include(self, kind: type[Observer]) -> bool:
        """Return whether one of this kind watches."""
        return any(isinstance(observer, kind) for observer in self._all)

    def remove(self, observer: Observer) -> None:
        """Tell it no longer."""
        self._all = tuple(other for other in self._all if other is not observer)
        self.are_there = bool(self._all)

    def begins(self, phase: Phase, unit: int) -> None:
        """Tell all; the backward of a unit ends where that of another begins."""
        if phase is Phase.BACKWARD:
            self.backward_pauses()
            self._computing.append(unit)
        self.steps += phase is Phase.INSTALL
        for observer in self._all:
            observer.begins(phase, unit)

    def ends(self, phase: Phase, unit: int) -> None:
        """Tell all."""
        for observer in self._all:
            observer.ends(phase, unit)

    @contextmanager
    def during(self, phase: Phase, unit: int) -> Iterator[None]:
        """Tell all, before and after."""
        if self:
            self.begins(phase, unit)
        try:
            yield
        except BaseException as error:
            if self:
                self.fails(phase, unit, error)
            raise
        if self:
            self.ends(phase, unit)

    def backward_pauses(self) -> None:
        """The unit whose backward computes, if any, does so no longer."""
        while self._computing:
            self.ends(Phase.BACKWARD, self._computing.pop())

    def lends(self, memory: Memory, unit: int, block: Block) -> None:
        """Tell all."""
        for observer in self._all:
            observer.lends(memory, unit, block)

    def takes_back(self, memory: Memory, unit: int, block: Block) -> None:
        """Tell all."""
        for observer in self._all:
            observer.takes_back(memory, unit, block)

    def leaves(self, phase: Phase, unit: int, failed: bool) -> None:
        """Tell all that it is over; where it failed, by the exception that is being handled."""
        error = sys.exc_info()[1] if failed else None
        if error is None:
            self.ends(phase, unit)
        else:
            self.fails(phase, unit, error)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:
        """Tell all."""
        for observer in self._all:
            observer.fails(phase, unit, error)

    def forget(self) -> None:
        """A pass was broken off: tell all."""
        self._computing.clear()
        for observer in self._all:
            observer.forgets()

    def explanations(self) -> list[str]:
        """What they know about why communication has just failed."""
        return [text for text in (observer.explains() for observer in self._all) if text]

    def number(self) -> int:
        """Count a collective."""
        self._next += 1
        return self._next - 1

    def communicates(self, number: int, moment: Moment, lane: str, work: dist.Work | None = None) -> None:
        """Tell all."""
        for observer in self._all:
            observer.communicates(number, moment, lane, work)


class Verifier(Protocol):
    """What the executor tells of what it is about to do."""

    def gather(self, unit: int, num_bytes: int) -> None:
        """This rank is about to gather a unit's weights."""

    def reduce(self, unit: int, num_bytes: int) -> None:
        """This rank is about to reduce a unit's gradients."""

    def end_forward(self, failed: bool) -> None:
        """The outermost forward is over, perhaps by an exception."""

    def end_backward(self) -> None:
        """A backward that reduces is over."""

    def note_step(self) -> None:
        """An optimizer of the model has stepped."""

    def change(self) -> None:
        """`requires_grad` of some parameter was changed."""

    def forget(self) -> None:
        """The model was brought to rest after an exception."""
