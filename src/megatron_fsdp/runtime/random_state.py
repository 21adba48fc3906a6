"""The same random numbers on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_fsdp.notices import warn_caller
from megatron_fsdp.runtime.fingerprint import fingerprint, lowest_and_highest

RandomState = tuple[torch.Tensor, ...]
"""States of the CPU's generator and, where that is another, of the device's."""


def random_state(device: torch.device) -> RandomState:
    """The states of the generators that random numbers for `device` may come from."""
    cpu = torch.get_rng_state()
    return (cpu,) if device.type == "cpu" else (cpu, torch.get_device_module(device).get_rng_state(device))


def set_random_state(device: torch.device, state: RandomState) -> None:
    """Go on from states that `random_state` gave."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], device)


@contextmanager
def same_random_numbers(groups: Sequence[dist.ProcessGroup], device: torch.device) -> Iterator[None]:
    """Let every rank draw what the first rank of the groups draws.

    Where ranks were seeded alike nothing is changed and generators go on from where the block leaves them; else the
    ranks take the first one's state for the block, are warned, and have their own back afterwards. So they have after
    an exception.

    Args:
        groups: Process groups that this rank belongs to, one after another, such as those of the mesh axes.
        device: Where tensors are drawn, and where states travel.
    """
    own = random_state(device)
    differ = [_follow_first(group, device) for group in groups]
    if any(differ):
        warn_caller(
            "ranks were seeded differently, so the weights were initialised with the random numbers of the first rank "
            "of the group; seed every rank alike before sharding"
        )
    try:
        yield
    except BaseException:
        set_random_state(device, own)
        raise
    if any(differ):
        set_random_state(device, own)


def _follow_first(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Take the random state of the group's first rank; whether any rank had another."""
    mine = random_state(device)
    states = [state.to(device) for state in mine]
    hashes = torch.stack([fingerprint(state) for state in states])
    if torch.equal(*lowest_and_highest(hashes, group)):
        return False
    for state in states:
        dist.broadcast(state, group_src=0, group=group)
    set_random_state(device, tuple(state.to(before.device) for state, before in zip(states, mine, strict=True)))
    return True
