"""Observers of a model: they see every phase of every unit, and the collectives of its communication streams.

Timelines, logs of hanging ranks and checks of buffers are all observers. Without one, a phase costs the test of a
truth value. Observers see what happens on this rank, in order, and change nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron_fsdp.comm.collectives import Moment
from megatron_fsdp.engine.memory import Block
from megatron_fsdp.engine.schedule import Action
from megatron_fsdp.errors import WRAPPER_REMEDIES, MegatronFSDPError, missing_ranks, words_of


class Phase(Enum):
    """A phase of a step on this rank's host. Phases nest: a forward inside a backward is a recomputation."""

    UNSHARD = "unshard"  # starting the all-gather of a unit's weights
    WAIT = "wait"  # waiting for them
    RESHARD = "reshard"  # its weights leave their slot
    REDUCE = "reduce"  # starting the reduction of a unit's gradients
    FINALISE = "finalise"  # the backward is over: waiting for all reductions, setting gradients
    GATHER_OUTER = "outer gather"  # starting an all-gather over the outer axis
    REDUCE_OUTER = "outer reduce"  # starting a reduction over the outer axis
    RETIRE = "retire"  # waiting for a reduction, because its memory is needed or the backward ends
    FORWARD = "forward"  # the unit's module computes
    BACKWARD = "backward"  # the unit's backward computes, until that of another unit begins or the backward ends
    COPY = "copy"  # a gradient is copied into its bucket
    INSTALL = "install"  # main weights are copied into compute weights; a step lies between two of these
    AGREE = "agree"  # agreeing with the other ranks: used parameters, checks of gradients, arguments
    NORM = "norm"  # the norm of all gradients
    WHOLE = "whole tensors"  # gathering or sending whole tensors outside of forward and backward


class BorrowedMemory(Enum):
    """A kind of borrowed memory; the value is its name in messages."""

    WEIGHTS = "gathered weights"
    BUCKET = "communication bucket"
    SCRATCH = "scratch of a reduction"


Open = TypeVar("Open", bound="OpenPhase")


class OpenPhase(Protocol):
    """Record that an observer keeps of a phase that has begun."""

    @property
    def phase(self) -> Phase | str:
        """The phase."""

    @property
    def unit(self) -> int:
        """The unit."""


def close_phase(begun: list[Open], phase: Phase | str, unit: int) -> list[Open]:
    """Pop a phase that has ended, and those nested in it, from the list of open phases.

    Returns the popped phases, outermost first; empty if the phase has not begun.
    """
    places = [place for place, each in enumerate(begun) if (each.phase, each.unit) == (phase, unit)]
    ended = begun[places[-1] :] if places else []
    del begun[len(begun) - len(ended) :]
    return ended


PHASE_OF: dict[Action, Phase] = {
    Action.UNSHARD: Phase.UNSHARD,
    Action.WAIT: Phase.WAIT,
    Action.RESHARD: Phase.RESHARD,
    Action.REDUCE: Phase.REDUCE,
    Action.FINALISE: Phase.FINALISE,
}


class Observer:
    """Base class of observers, whose methods are no-ops. Errors of an observer end the training step."""

    def begins(self, phase: Phase, unit: int) -> None:
        """Observe the begin of a phase of a unit; for phases of the whole model the unit is the root, 0."""

    def ends(self, phase: Phase, unit: int) -> None:
        """Observe the end of a phase, unless an exception has ended it."""

    def lends(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Observe that a unit borrows memory for its weights or gradients; for weights, inside of its unshard.

        The block may be longer than what the unit has: its groups are padded, and a slot that is kept, or planned
        memory, fits the largest unit.
        """

    def takes_back(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Observe that a bucket or scratch is given back after its reduction. Weights are resharded instead."""

    def forgets(self) -> None:
        """Observe a reset after an exception: no phase is running."""

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None) -> None:
        """Observe the progress of a collective, which is numbered from 0 on this rank and for this model.

        Launch and completion of one collective are observed inside of different phases: that of its launch tells the
        unit and the purpose. `stream` is "gather", "reduce" or "outer"; `work` the handle where it was just launched,
        if the back end gave one.
        """

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:
        """Observe that an exception has ended a phase; the phases inside of it end without a call."""

    def explains(self) -> str:
        """Explain a failure of communication; empty if nothing is known."""
        return ""


ON_REQUEST = frozenset({Phase.AGREE, Phase.NORM, Phase.WHOLE})
"""Phases that take all ranks and that the caller asks for, outside of forward and backward too."""


class Observers:
    """The observers of one model, as one."""

    def __init__(self) -> None:
        self.watching: tuple[Observer, ...] = ()  # in the order in which they were added
        self.active = False  # there is any; asked before each report, so that none costs a truth value
        self.remedies = WRAPPER_REMEDIES
        self._next = 0
        self._computing: list[int] = []  # the unit whose backward computes, if any
        self.steps = 0  # how often weights have been installed while there were observers

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self.watching = (*self.watching, observer)
        self.active = True

    def remove(self, observer: Observer) -> None:
        """Remove an observer."""
        self.watching = tuple(other for other in self.watching if other is not observer)
        self.active = bool(self.watching)

    def begins(self, phase: Phase, unit: int) -> None:
        """Report the begin of a phase; the backward of a unit ends where that of another begins."""
        if phase is Phase.BACKWARD:
            self.backward_pauses()
            self._computing.append(unit)
        self.steps += phase is Phase.INSTALL
        for observer in self.watching:
            observer.begins(phase, unit)

    def ends(self, phase: Phase, unit: int) -> None:
        """Report the end of a phase."""
        for observer in self.watching:
            observer.ends(phase, unit)

    @contextmanager
    def during(self, phase: Phase, unit: int) -> Iterator[None]:
        """Report begin and end of a phase around a block."""
        if self.active:
            self.begins(phase, unit)
        try:
            yield
        except BaseException as error:
            if self.active:
                self.fails(phase, unit, error)
            if phase in ON_REQUEST:
                explain(error, f"during {phase.value}, which every rank has to call", self)
            raise
        if self.active:
            self.ends(phase, unit)

    def backward_pauses(self) -> None:
        """End the backward phase of the unit whose backward computes, if any."""
        while self._computing:
            self.ends(Phase.BACKWARD, self._computing.pop())

    def lends(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Report that a unit borrows memory."""
        for observer in self.watching:
            observer.lends(memory, unit, block)

    def takes_back(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Report that memory is given back."""
        for observer in self.watching:
            observer.takes_back(memory, unit, block)

    def leaves(self, phase: Phase, unit: int, failed: bool) -> None:
        """Report the end of a phase, or its failure with the exception that is being handled."""
        error = sys.exc_info()[1] if failed else None
        if error is None:
            self.ends(phase, unit)
        else:
            self.fails(phase, unit, error)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:
        """Report a failed phase."""
        for observer in self.watching:
            observer.fails(phase, unit, error)

    def forget(self) -> None:
        """Report a reset."""
        self._computing.clear()
        for observer in self.watching:
            observer.forgets()

    def number(self) -> int:
        """Return a number for a new collective."""
        self._next += 1
        return self._next - 1

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None = None) -> None:
        """Report the progress of a collective."""
        for observer in self.watching:
            observer.communicates(number, moment, stream, work)


_HANG_ADVICE = (
    "this happens when ranks call different units (gloo may abort one of them with an error of its own): {join}; if a "
    "rank has raised an error of its own, see what it printed; if one is missing, MFSDP_HANG_LOG=DIR names it and what "
    "it does, and MFSDP_VERIFY_RANKS=1 finds the first difference between ranks (mfsdp docs debugging)"
)


def explain(error: BaseException, where: str, observers: Observers) -> None:
    """Add the place, and explanations, to the text of an error of a collective, such as a timeout.

    In the text, since many programs print no notes; a second time as a note. Other errors stay as they are.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, MegatronFSDPError | torch.OutOfMemoryError):
        return
    if hasattr(error, "__explained__"):
        error.add_note(where)
        return
    explanations = [text for text in (observer.explains() for observer in observers.watching) if text]
    missing = missing_ranks(error, where)
    advice = f"{where}; {missing}{_HANG_ADVICE.format(join=observers.remedies.join)}"
    words = [where, *explanations] if explanations else [advice]
    error.args = ("\n".join([*words, words_of(error)]), *error.args[1:])
    error.__explained__ = True  # type: ignore[attr-defined]


@contextmanager
def explained(where: str, observers: Observers) -> Iterator[None]:
    """Apply `explain` to errors raised inside of a block."""
    try:
        yield
    except RuntimeError as error:
        explain(error, where, observers)
        raise
