"""The states of borrowed memory, and what may be done with it in each: pure tables.

    gathered weights   SHARDED -> GATHERING -> READY -> SHARDED
    bucket             EMPTY -> FILLING -> REDUCING -> EMPTY
    scratch            EMPTY -> REDUCING -> EMPTY

An exception may leave anything half done; after a reset memory is BROKEN until it is released or used anew.
"""

from __future__ import annotations

from enum import Enum

from megatron_fsdp.engine.observer import Memory
from megatron_fsdp.errors import LifetimeError


class State(Enum):
    """What memory holds."""

    SHARDED = "SHARDED"  # weights: nothing that anybody may read
    GATHERING = "GATHERING"  # a collective writes
    READY = "READY"  # compute may read
    EMPTY = "EMPTY"  # nobody's
    FILLING = "FILLING"  # gradients are copied in
    REDUCING = "REDUCING"  # a collective reads and writes
    BROKEN = "BROKEN"  # a pass was broken off


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

LEGAL: dict[Memory, Table] = {
    Memory.WEIGHTS: {
        (State.SHARDED, Event.GATHER): State.GATHERING,
        (State.GATHERING, Event.ARRIVE): State.READY,
        (State.READY, Event.COMPUTE): State.READY,
        (State.READY, Event.RELEASE): State.SHARDED,
        (State.BROKEN, Event.ARRIVE): State.BROKEN,
        (State.BROKEN, Event.RELEASE): State.SHARDED,
        (State.BROKEN, Event.GATHER): State.GATHERING,
    },
    Memory.BUCKET: {
        (State.EMPTY, Event.LEND): State.FILLING,
        (State.FILLING, Event.FILL): State.FILLING,
        (State.FILLING, Event.REDUCE): State.REDUCING,
        (State.REDUCING, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.LEND): State.FILLING,
    },
    Memory.SCRATCH: {
        (State.EMPTY, Event.LEND): State.REDUCING,
        (State.REDUCING, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.GIVE_BACK): State.EMPTY,
        (State.BROKEN, Event.LEND): State.REDUCING,
    },
}
"""(state, event) -> the state after it; what is not here is illegal."""

AT_REST: dict[Memory, State] = {
    Memory.WEIGHTS: State.SHARDED,
    Memory.BUCKET: State.EMPTY,
    Memory.SCRATCH: State.EMPTY,
}
"""How memory begins, and where it has come back to when nothing is under way."""


def next_state(memory: Memory, state: State, event: Event, unit: str, where: str = "") -> State:
    """The state after an event.

    Args:
        memory: The kind of memory.
        state: Before.
        event: What is done.
        unit: Who does it, for the message.
        where: Which memory, and what is known of it, for the message.

    Raises:
        LifetimeError: It may not be done in this state.
    """
    after = LEGAL[memory].get((state, event))
    if after is None:
        allowed = ", ".join(other.value for known, other in LEGAL[memory] if known is state)
        raise LifetimeError(
            f"unit {unit}: {memory.value}{f' ({where})' if where else ''} cannot be {event.value} while {state.value}, "
            f"where it can only be {allowed}; this is a fault of the engine, or of code that drives it by hand"
        )
    return after
