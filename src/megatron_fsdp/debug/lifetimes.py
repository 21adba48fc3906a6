"""A debug switch: check every use of borrowed memory, and poison released memory.

The checker observes actions, not the scheduler's beliefs. Gathered weights, buckets and scratch go through the states
below; an illegal use raises and names unit, memory and state. Released memory, and lent memory before its first write,
holds NaN: a read that comes too late or too early shows in the loss and never yields another unit's values. Fills are
queued on the compute stream; the host never waits longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_fsdp.comm.collectives import Moment
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.memory import Block
from megatron_fsdp.engine.observer import BorrowedMemory, Observer, Phase
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import LifetimeError, ScheduleError

# The states of borrowed memory:
#
#     gathered weights   SHARDED -> UNSHARDING -> READY -> SHARDED
#     bucket             EMPTY -> FILLING -> REDUCING -> EMPTY
#     scratch            EMPTY -> REDUCING -> EMPTY
#
# An exception may interrupt anything; after a reset memory is BROKEN until it is released or used anew.


class State(Enum):
    """The state of borrowed memory."""

    SHARDED = "SHARDED"  # weights that nothing may read
    UNSHARDING = "UNSHARDING"  # a collective writes
    READY = "READY"  # compute may read
    EMPTY = "EMPTY"  # not lent
    FILLING = "FILLING"  # gradients are copied in
    REDUCING = "REDUCING"  # a collective reads and writes
    BROKEN = "BROKEN"  # a forward or backward was interrupted


class Event(Enum):
    """An action on memory; the value completes "cannot be ..."."""

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
        (State.SHARDED, Event.GATHER): State.UNSHARDING,
        (State.UNSHARDING, Event.ARRIVE): State.READY,
        (State.READY, Event.COMPUTE): State.READY,
        (State.READY, Event.RELEASE): State.SHARDED,
        (State.BROKEN, Event.ARRIVE): State.BROKEN,
        (State.BROKEN, Event.RELEASE): State.SHARDED,
        (State.BROKEN, Event.GATHER): State.UNSHARDING,
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
"""(state, event) -> the next state; other pairs are illegal."""


def next_state(memory: BorrowedMemory, state: State, event: Event, unit: str, where: str = "") -> State:
    """Return the state after an event."""
    after = LEGAL[memory].get((state, event))
    if after is None:
        allowed = ", ".join(other.value for known, other in LEGAL[memory] if known is state)
        raise LifetimeError(
            f"unit {unit}: {memory.value}{f' ({where})' if where else ''} cannot be {event.value} while {state.value}, "
            f"where it can only be {allowed}; {_FAULT}"
        )
    return after


_FAULT = "this is a fault of the engine, or of code that drives it by hand"
_FOLLOWED = (Phase.UNSHARD, Phase.REDUCE, Phase.GATHER_OUTER, Phase.REDUCE_OUTER, Phase.RETIRE)


@dataclass(eq=False)
class _Borrowed:
    """The state of a unit's gathered weights, or of a block lent as bucket or scratch."""

    memory: BorrowedMemory
    state: State
    label: str = ""  # of the unit that has it, or had it last
    name: str = ""  # of a block
    is_followed: bool = True  # False: weights that are never gathered
    block: Block | None = None  # that holds weights
    forwards: int = 0  # that compute with weights

    def use(self, event: Event, unit: str) -> None:
        """Apply an event of a unit."""
        if self.is_followed:
            where = f"{self.name}, last lent to unit {self.label}" if self.name and self.label else self.name
            self.state = next_state(self.memory, self.state, event, unit, where)


class LifetimeChecker(Observer):
    """An observer that checks and poisons the memory of one model."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._weights = [_Borrowed(BorrowedMemory.WEIGHTS, State.SHARDED, unit.label) for unit in units]
        for weights, unit in zip(self._weights, units, strict=True):
            weights.is_followed = any(group.plan.needs_all_gather for group in unit.groups)
        self._holders: WeakKeyDictionary[Block, _Borrowed] = WeakKeyDictionary()
        self._lent: WeakKeyDictionary[Block, _Borrowed] = WeakKeyDictionary()
        self._buckets: dict[int, _Borrowed] = {}  # the last one lent to each unit
        self._made = dict.fromkeys(BorrowedMemory, 0)
        self._phases: list[tuple[Phase, int]] = []
        self._in_flight: dict[int, _Borrowed] = {}  # by the number of a collective, until it is waited for

    def begins(self, phase: Phase, unit: int) -> None:
        """Check an action before it begins."""
        weights = self._weights[unit]
        if phase in _FOLLOWED:
            self._phases.append((phase, unit))
        if phase is Phase.UNSHARD:
            weights.use(Event.GATHER, weights.label)
        elif phase is Phase.RESHARD:
            if weights.forwards:
                raise LifetimeError(
                    f"unit {weights.label}: {weights.memory.value} cannot be released while its forward computes with "
                    f"them; {_FAULT}"
                )
            weights.use(Event.RELEASE, weights.label)
        elif phase in (Phase.FORWARD, Phase.BACKWARD):
            weights.use(Event.COMPUTE, weights.label)
            weights.forwards += phase is Phase.FORWARD

    def ends(self, phase: Phase, unit: int) -> None:
        """Check an action that has ended, and update states."""
        weights, bucket = self._weights[unit], self._buckets.get(unit)
        if phase in _FOLLOWED:
            self._phases.remove((phase, unit))
        if phase is Phase.WAIT:
            self._check_waited(weights, weights.label)
            weights.use(Event.ARRIVE, weights.label)
        elif phase is Phase.RESHARD and weights.block is not None:
            weights.block.poison()
            self._holders.pop(weights.block, None)
            weights.block = None
        elif phase is Phase.FORWARD:
            weights.forwards = max(0, weights.forwards - 1)
        elif phase is Phase.COPY and bucket is not None:
            bucket.use(Event.FILL, weights.label)
        elif phase is Phase.REDUCE and bucket is not None:
            del self._buckets[unit]
            bucket.use(Event.REDUCE, weights.label)

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:  # noqa: ARG002
        """End a failed forward; any other failure leaves a state that only a reset repairs."""
        if phase is Phase.FORWARD:
            self.ends(phase, unit)

    def lends(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Check that the memory is free, and poison it."""
        weights = self._weights[unit]
        if memory is BorrowedMemory.WEIGHTS:
            holder = self._holders.get(block, weights)
            if holder is not weights:
                raise LifetimeError(
                    f"unit {weights.label}: {memory.value} cannot be gathered into memory in which unit {holder.label} "
                    f"is {holder.state.value}; it has to be released first"
                )
            self._holders[block] = weights
            weights.block = block
        else:
            if block not in self._lent:
                self._lent[block] = _Borrowed(memory, State.EMPTY, name=f"number {self._made[memory]}")
                self._made[memory] += 1
            lent = self._lent[block]
            lent.memory = memory
            lent.use(Event.LEND, weights.label)
            lent.label = weights.label
            if memory is BorrowedMemory.BUCKET:
                self._buckets[unit] = lent
        block.poison()

    def takes_back(self, memory: BorrowedMemory, unit: int, block: Block) -> None:
        """Check that the reduction is over, and poison the memory."""
        lent, label = self._lent.get(block), self._weights[unit].label
        if lent is None:
            raise LifetimeError(f"unit {label}: {memory.value} cannot be given back, for it was never lent")
        self._check_waited(lent, label)
        lent.use(Event.GIVE_BACK, label)
        block.poison()

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None) -> None:  # noqa: ARG002
        """Record the memory of a collective until the collective was waited for."""
        if moment is Moment.LAUNCHED and self._phases:
            phase, unit = self._phases[-1]
            if phase is Phase.UNSHARD:
                self._in_flight[number] = self._weights[unit]
            elif phase is Phase.REDUCE and unit in self._buckets:
                self._in_flight[number] = self._buckets[unit]
        elif moment is Moment.WAITED:
            self._in_flight.pop(number, None)

    def _check_waited(self, borrowed: _Borrowed, label: str) -> None:
        count = sum(each is borrowed for each in self._in_flight.values())
        if count:
            raise LifetimeError(
                f"unit {label}: {borrowed.memory.value} cannot be used on while {count} collectives that write there "
                f"have not been waited for; {_FAULT}"
            )

    def forgets(self) -> None:
        """Mark all memory as broken after a reset: work in flight may be abandoned."""
        self._phases.clear()
        self._in_flight.clear()
        self._holders.clear()
        self._buckets.clear()
        for borrowed in (*self._weights, *self._lent.values()):
            borrowed.state, borrowed.forwards = State.BROKEN, 0


def check_lifetimes(engine: Engine) -> None:
    """Check every use of borrowed memory from now on; further calls do nothing.

    Raises:
        ScheduleError: A forward or backward runs.
    """
    if engine.scheduler.in_forward or engine.scheduler.in_backward:
        raise ScheduleError("check_lifetimes was called inside a forward or backward; call it between steps")
    if not any(isinstance(each, LifetimeChecker) for each in engine.observers.watching):
        # Reshard everything: the checker knows nothing of weights that were gathered before.
        engine.executor.run(engine.scheduler.weights_changed())
        engine.observers.add(LifetimeChecker(engine.units))
