"""Find out whether the ranks of an axis can share memory, and set it up where they can."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_fsdp.comm.axis import Axis
from megatron_fsdp.comm.groups import gather_objects, timeout_of
from megatron_fsdp.comm.real_values import is_simulated, real_values
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.shm.futex import has_futex
from megatron_fsdp.shm.mailbox import Mailboxes
from megatron_fsdp.shm.shared_arena import Arena, Place, machine_of_process, make_arena, open_arena, started_at
from megatron_fsdp.shm.shared_memory import SharedMemory

Value = TypeVar("Value")

VARIABLE = "MFSDP_SHARED_MEMORY"
MOST_RANKS = 64
"""More than these are not expected on the CPUs of one host; an all-reduce reads the whole buffer of each."""


def resolve_shared_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether CPU ranks of one machine may communicate through shared memory.

    Args:
        environment: Where `MFSDP_SHARED_MEMORY` is 1 (as when it is not set), or 0.

    Raises:
        ConfigurationError: It is something else.
    """
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{VARIABLE}={value!r}; give 1 (as when it is not set) or 0: use sockets only")
    return value != "0"


@real_values()
def over_shared_memory(axis: Axis, device: torch.device) -> Axis:
    """The same axis, which communicates through shared memory where all its ranks can. Collective, by all ranks.

    Args:
        axis: Whose ranks.
        device: Where the tensors are.

    Returns:
        The axis as it was where it is of one rank, on an accelerator, over another back end than gloo, with a second
        group for gathers, over several hosts, or where one of the ranks is not allowed what it takes: on all of them.
    """
    if axis.group is None or device.type != "cpu" or axis.num_ranks > MOST_RANKS:
        return axis
    if axis.gather_group not in (None, axis.group):  # whoever asks for a group of its own for gathers wants it used
        return axis
    if is_simulated(axis.group) or dist.get_backend(axis.group) != dist.Backend.GLOO:
        return axis
    made = _offer()
    try:
        offers = _collect(axis, made[0] if made is not None else None)
        arenas = _open_all(axis.rank, made[1], offers) if made is not None else None
        has_all = _collect(axis, arenas is not None)  # nobody closes a file that another has still to open
    finally:
        if made is not None:
            os.close(made[0].descriptor)
    if arenas is None or not all(has_all):
        return axis
    places = {rank: place for rank, place in enumerate(offers) if place is not None}
    timeout = timeout_of(axis.group) or timedelta(minutes=30)
    boxes = Mailboxes(axis.rank, dict(enumerate(arenas)), places, timeout)
    shared = SharedMemory(axis.rank, arenas, boxes)
    weakref.finalize(shared, _leave, os.getpid(), boxes.leave)
    return replace(axis, shared=shared)


def _leave(owner: int, leave: Callable[[], None]) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        leave()


def _offer() -> tuple[Place, Arena] | None:
    """This rank's arena, and where others find it; None where there can be none."""
    if not has_futex():
        return None
    try:
        machine, started = machine_of_process(), started_at(os.getpid())
        descriptor, arena = make_arena()
    except (OSError, AttributeError):  # not in every build of Python
        return None
    return Place(machine, os.getpid(), started or 0, descriptor, dist.get_rank(), arena.token), arena


def _open_all(rank: int, own: Arena, offers: list[Place | None]) -> list[Arena] | None:
    """The arenas of all ranks; None where one cannot be had."""
    places = [place for place in offers if place is not None]
    if len(places) < len(offers) or len({place.machine for place in places}) > 1:
        return None
    try:
        return [own if other == rank else open_arena(place) for other, place in enumerate(places)]
    except OSError:
        return None


def _collect(axis: Axis, value: Value) -> list[Value]:
    assert axis.group is not None
    return gather_objects(axis.group, value)
