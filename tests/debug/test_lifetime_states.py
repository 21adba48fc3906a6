"""The table of states: what is legal, told apart from everything else; and the switches of both debug tools."""

import itertools

import pytest

from megatron_fsdp.config.switches import resolve_check_lifetimes
from megatron_fsdp.debug.lifetimes import (
    AT_REST,
    LEGAL,
    BorrowedMemory,
    Event,
    State,
    next_state,
)
from megatron_fsdp.errors import ConfigurationError, LifetimeError

_LIVES = {
    BorrowedMemory.WEIGHTS: [Event.GATHER, Event.ARRIVE, Event.COMPUTE, Event.COMPUTE, Event.RELEASE],
    BorrowedMemory.BUCKET: [Event.LEND, Event.FILL, Event.FILL, Event.REDUCE, Event.GIVE_BACK],
    BorrowedMemory.SCRATCH: [Event.LEND, Event.GIVE_BACK],
}


@pytest.mark.parametrize("memory", BorrowedMemory)
def test_an_ordinary_life_ends_where_it_began(memory: BorrowedMemory) -> None:
    state = AT_REST[memory]
    for event in _LIVES[memory] * 2:
        state = next_state(memory, state, event, "u")
    assert state is AT_REST[memory]


def test_everything_else_raises_with_names() -> None:
    count = 0
    for memory, state, event in itertools.product(BorrowedMemory, State, Event):
        if (state, event) not in LEGAL[memory]:
            count += 1
            with pytest.raises(LifetimeError) as caught:
                next_state(memory, state, event, "layers.7", "number 2")
            for told in ("layers.7", "number 2", memory.value, f"cannot be {event.value}", state.value):
                assert told in str(caught.value)
    assert count == 3 * 7 * 8 - 7 - 6 - 4


def test_switch() -> None:
    assert not resolve_check_lifetimes({})
    for value, expected in (("1", True), ("0", False), ("", False)):
        assert resolve_check_lifetimes({"MFSDP_CHECK_LIFETIMES": value}) is expected
    with pytest.raises(ConfigurationError, match="MFSDP_CHECK_LIFETIMES='yes' is not a switch; give 1 or 0"):
        resolve_check_lifetimes({"MFSDP_CHECK_LIFETIMES": "yes"})
