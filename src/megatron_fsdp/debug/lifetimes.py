"""A debug switch: check every use of borrowed memory, and poison released memory.

The checker watches what is done, not what the scheduler believes. Gathered weights, buckets and scratch go through the
states below; an illegal use raises, naming unit, memory and state. Released memory, and memory that is lent and not
written yet, holds NaN, so that a read that comes too late or too early shows in the loss and never yields values of
another unit. Fills are queued on the compute stream; the host never waits longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_fsdp.comm.lanes import Moment
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.memory import Block
from megatron_fsdp.engine.observer import BorrowedMemory, Observer, Phase
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import LifetimeError, ScheduleError

# The states of borrowed memory:
#
#     gathered weights   SHARDED -> GATHERING -> READY -> SHARDED
#     bucket             EMPTY -> FILLING -> REDUCING -> EMPTY
#     scratch            EMPTY -> REDUCING -> EMPTY
#
# An exception may interrupt anything; after a reset memory is BROKEN until it is released or used anew.


class State(Enum):
    """The state of borrowed memory."""

    SHARDED = "SHARDED"  # weights that nothing may read
    GATHERING = "GATHERING"  # a collective writes
    READY = "READY"  # compute may read
    EMPTY = "EMPTY"  # not lent
    FILLING = "FILLING"  # gradients are copied in
    REDUCING = "REDUCING"  # a collective reads and writes
    BROKEN = "BROKEN"  # a forward or backward was interrupted


class Event(Enum):
    """What is done with memory; the value completes "cannot be ..."."""

    GATHER = "gathered into"
    ARRIVE = "waited for"
    COMPUTE = "computed with"
    RELEASE = "released"
    LEND = "lent"
    FILL = "filled"
    REDUCE = "reduced"
    GIVE_BACK = "given back"


Table = dict[tuple[State, Event], State]

LEGAL: dict[BorrowedMemory, Table] = {
    BorrowedMemory.WEIGHTS: {
        (State.SHARDED, Event.GATHER): State.GATHERING,
        (State.GATHERING, Event.ARRIVE): State.READY,
        (State.READY, Event.COMPUTE): State.READY,
        (State.READY, Event.RELEASE): State.SHARDED,
        (State.BROKEN, Event.ARRIVE): State.BROKEN,
        (State.BROKEN, Event.RELEASE): State.SHARDED,
        (State.BROKEN, Event.GATHER): State.GATHERING,
    },
    BorrowedMemory.BUCKET: {
        (State.EMPTY, Event.LEND): State.FILLING,
        (State.FILLING, Event.FILL): State.FILLING,
        (State.FILLING, Event.REDUCE): State.REDUCING,
        (State.REDUCING, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.LEND): State.FILLING,
    },
    BorrowedMemory.SCRATCH: {
        (State.EMPTY, Event.LEND): State.REDUCING,
        (State.REDUCING, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.LEND): State.REDUCING,
    },
}
"""(state, event) -> the next state; what is not here is illegal."""

AT_REST: dict[BorrowedMemory, State] = {
    BorrowedMemory.WEIGHTS: State.SHARDED,
    BorrowedMemory.BUCKET: State.EMPTY,
    BorrowedMemory.SCRATCH: State.EMPTY,
}
"""State of memory at the start and between steps."""


def next_state(memory: BorrowedMemory, state: State, event: Event, unit: str, where: str = "") -> State:
    """Return the state after an event."""
    after = LEGAL[memory].get((state, event))
    if after is None:
        allowed = ", ".join(other.value for known, other in LEGAL[memory] if known is state)
        raise LifetimeError(
            f"unit {unit}: {memory.value}{f' ({where})' if where else ''} cannot be {event.value} while {state.value}, "
            f"where it can only be {allowed}; this is a fault of the engine, or of code that drives it by hand"
        )
    return after


_FOLLOWED = (Phase.GATHER, Phase.REDUCE, Phase.GATHER_OUTER, Phase.REDUCE_OUTER, Phase.RETIRE)


@dataclass
class _Weights:
    """The gathered weights of one unit."""

    label: str
    needs_all_gather: bool
    state: State = State.SHARDED
    block: Block | None = None
    forwards: int = 0
    on_its_way: set[int] = field(default_factory=set)  # collectives that were not waited for


@dataclass
class _Lent:
    """A bucket or scratch block."""

    name: str
    state: State
    unit: str = ""
    on_its_way: set[int] = field(default_factory=set)


class LifetimeChecker(Observer):
    """An observer that checks and poisons the memory of one model."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._weights = [
            _Weights(unit.label, any(group.plan.needs_all_gather for group in unit.groups)) for unit in units
        ]
        self._holders: WeakKeyDictionary[Block, _Weights] = WeakKeyDictionary()
        self._lent: WeakKeyDictionary[Block, _Lent] = WeakKeyDictionary()
        self._buckets: dict[int, _Lent] = {}  # the last one lent to each unit
        self._made = dict.fromkeys(BorrowedMemory, 0)
        self._phases: list[tuple[Phase, int]] = []
        self._places: dict[int, set[int]] = {}  # by number of a collective, the set that holds it until its wait

    # ---- weights ------------------------------------------------------------------------------------------------

    def begins(self, phase: Phase, unit: int) -> None:
        """Check what is about to be done."""
        weights = self._weights[unit]
        if phase in _FOLLOWED:
            self._phases.append((phase, unit))
        if phase is Phase.GATHER:
            self._move(weights, Event.GATHER)
        elif phase is Phase.RELEASE:
            if weights.forwards:
                raise LifetimeError(
                    f"unit {weights.label}: {BorrowedMemory.WEIGHTS.value} cannot be released while its forward "
                    "computes with them; this is a fault of the engine, or of code that drives it by hand"
                )
            self._move(weights, Event.RELEASE)
        elif phase in (Phase.FORWARD, Phase.BACKWARD):
            self._move(weights, Event.COMPUTE)
            weights.forwards += phase is Phase.FORWARD

    def ends(self, phase: Phase, unit: int) -> None:
        """Check what has been done, and follow the states."""
        weights = self._weights[unit]
        if phase in _FOLLOWED:
            self._phases.remove((phase, unit))
        if phase is Phase.WAIT:
            self._check_waited(BorrowedMemory.WEIGHTS, weights.label, weights.on_its_way)
            self._move(weights, Event.ARRIVE)
        elif phase is Phase.RELEASE:
            self._poison_weights(weights)
        elif phase is Phase.FORWARD:
            weights.forwards = max(0, weights.forwards - 1)
        elif phase is Phase.COPY and unit in self._buckets:
            self._use(BorrowedMemory.BUCKET, self._buckets[unit], Event.FILL, weights.label)
        elif phase is Phase.REDUCE and unit in self._buckets:
            self._use(BorrowedMemory.BUCKET, self._buckets.pop(unit), Event.REDUCE, weights.label)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:  # noqa: ARG002
        """End a forward that failed; anything else that failed leaves a state that only a reset mends."""
        if phase is Phase.FORWARD:
            self.ends(phase, unit)

    def _move(self, weights: _Weights, event: Event) -> None:
        if weights.needs_all_gather:
            weights.state = next_state(BorrowedMemory.WEIGHTS, weights.state, event, weights.label)

    def _poison_weights(self, weights: _Weights) -> None:
        block, weights.block = weights.block, None
        if block is not None:
            block.poison()
            self._holders.pop(block, None)

    # ---- memory -------------------------------------------------------------------------------------------------

    def lends(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Check that the memory is free, and poison it."""
        label = self._weights[unit].label
        if memory is BorrowedMemory.WEIGHTS:
            self._hold(self._weights[unit], block)
        else:
            if block not in self._lent:
                self._lent[block] = _Lent(f"number {self._made[memory]}", AT_REST[memory])
                self._made[memory] += 1
            lent = self._lent[block]
            self._use(memory, lent, Event.LEND, label)
            lent.unit = label
            if memory is BorrowedMemory.BUCKET:
                self._buckets[unit] = lent
        block.poison()

    def takes_back(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Check that the reduction is over, and poison the memory."""
        lent, label = self._lent.get(block), self._weights[unit].label
        if lent is None:
            raise LifetimeError(f"unit {label}: {memory.value} cannot be given back, for it was never lent")
        self._check_waited(memory, label, lent.on_its_way)
        self._use(memory, lent, Event.GIVE_BACK, label)
        block.poison()

    def _hold(self, weights: _Weights, block: Block) -> None:
        holder = self._holders.get(block)
        if holder is not None and holder is not weights:
            raise LifetimeError(
                f"unit {weights.label}: {BorrowedMemory.WEIGHTS.value} cannot be gathered into memory in which unit "
                f"{holder.label} is {holder.state.value}; it has to be released first"
            )
        self._holders[block] = weights
        weights.block = block

    def _use(self, memory: BorrowedMemory, lent: _Lent, event: Event, label: str) -> None:
        where = lent.name if not lent.unit else f"{lent.name}, last lent to unit {lent.unit}"
        lent.state = next_state(memory, lent.state, event, label, where)

    # ---- communication ------------------------------------------------------------------------------------------

    def communicates(self, number: int, moment: Moment, lane: str, work: dist.Work | None) -> None:  # noqa: ARG002
        """Record which memory a collective works on, until it was waited for."""
        if moment is Moment.LAUNCHED:
            phase, unit = self._phases[-1] if self._phases else (None, 0)
            place = None
            if phase is Phase.GATHER:
                place = self._weights[unit].on_its_way
            elif phase is Phase.REDUCE and unit in self._buckets:
                place = self._buckets[unit].on_its_way
            if place is not None:
                place.add(number)
                self._places[number] = place
        elif moment is Moment.WAITED:
            self._places.pop(number, set()).discard(number)

    def _check_waited(self, memory: BorrowedMemory, label: str, on_its_way: set[int]) -> None:
        if on_its_way:
            raise LifetimeError(
                f"unit {label}: {memory.value} cannot be used on while {len(on_its_way)} collectives that write there "
                "have not been waited for; this is a fault of the engine, or of code that drives it by hand"
            )

    def forgets(self) -> None:
        """Mark everything as broken after a reset: whatever was in flight may be abandoned."""
        self._phases.clear()
        self._places.clear()
        self._holders.clear()
        self._buckets.clear()
        for weights in self._weights:
            weights.state, weights.forwards = State.BROKEN, 0
            weights.on_its_way.clear()
        for lent in self._lent.values():
            lent.state = State.BROKEN
            lent.on_its_way.clear()


def check_lifetimes(engine: Engine) -> None:
    """Check every use of borrowed memory from now on; further calls do nothing.

    It is refused while a forward or backward runs.
    """
    if engine.scheduler.in_forward or engine.scheduler.in_backward:
        raise ScheduleError("check_lifetimes was called inside a forward or backward; call it between steps")
    if not engine.observers.include(LifetimeChecker):
        engine.executor.run(engine.scheduler.weights_changed())
        engine.observers.add(LifetimeChecker(engine.units))
