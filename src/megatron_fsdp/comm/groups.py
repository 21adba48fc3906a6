"""Process groups owned by one model, whose collectives cannot be matched with anybody else's."""

from __future__ import annotations

import atexit
import functools
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.collectives import Axis, is_simulated, real_values

set_timeout: Callable[..., None] = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
"""Set the timeout of later collectives of a group; torch 2.14 has a public name for it."""

_PATIENCE_S = 1.0
_LOOK_S = 0.005
_LOOKS = 3  # in a row at which nothing is to be done


def bound_device(backend: str, device: torch.device) -> torch.device | None:
    """Return the `device_id` for `init_process_group`: this rank's accelerator, if its back end communicates there.

    NCCL then connects at once, on the right device, and groups of some of the ranks are split off that. The CPU is none
    to bind, and gloo has nothing to connect.
    """
    return None if device.type == "cpu" or backend == dist.Backend.GLOO else device


@functools.cache
def settle_at_exit() -> None:
    """Wait at exit until gloo's threads have dropped their tensors.

    They hold what they have sent for a moment after the wait for it is over. Python ends a thread that frees a tensor
    while it shuts down itself, and C++ then the process: "terminate called without an active exception".
    """
    atexit.register(_settle)


def _settle() -> None:
    looks, until = 0, time.monotonic() + _PATIENCE_S
    while looks < _LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_S)  # without the interpreter's lock, for which a thread may wait
        looks = looks + 1 if not any(map(_runs, Path("/proc/self/task").glob("*/stat"))) else 0


def _runs(stat: Path) -> bool:
    """Return True if a thread is a busy worker of gloo."""
    with suppress(OSError):  # it has ended
        name, _, state = stat.read_text().rpartition(")")
        return "(pt_gloo" in name and not state.startswith(" S")
    return False


class OwnGroups:
    """The process groups of one model, destroyed with it. Every rank of the axes constructs it, in one order.

    `axes` are the given ones in order, on groups of the same ranks. A group that a user gave for gathers stays.
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        """Make a group for each axis of more than one rank."""
        groups: list[dist.ProcessGroup] = []
        destroy_with(self, groups)  # before the first group: a later one may fail
        self.axes = tuple(_over_own_group(axis, groups) for axis in axes)


def destroy_with(owner: object, groups: list[dist.ProcessGroup]) -> None:
    """Destroy groups when their owner is deleted, on this rank alone."""
    # Not at exit, when torch has its own order of taking groups down.
    weakref.finalize(owner, _destroy, groups).atexit = False


def shared_name(kind: str, *groups: dist.ProcessGroup) -> str:
    """Return a name for a new group, the same on its ranks; collective over the groups, one after another.

    Of several groups, such as those of a mesh's dimensions, ranks that one of them joins have one name after it.
    """
    names = [f"megatron_fsdp_{kind}_{uuid.uuid4().hex}"]
    for group in groups:
        dist.broadcast_object_list(names, group=group, group_src=0)
    return names[0]


def duplicate_group(
    group: dist.ProcessGroup, name: str, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make a new group of the same ranks in the same order; collective over these ranks only.

    torch names a group of some of the ranks by how many groups a rank is in. That may differ between them, and they
    would wait for each other under different names; so the name is given, the same on all ranks and never used before.
    Without `backend` it is that of the group, without `timeout` torch's default for gloo.
    """
    return _named_group(dist.get_process_group_ranks(group), name, backend or dist.get_backend(group), timeout)


def group_over(mesh: DeviceMesh, owner: object) -> dist.ProcessGroup | None:
    """Return a group of all ranks of a mesh, in its order; None for a single rank.

    For a mesh of several dimensions a group is made, which is destroyed with its owner; then all its ranks call.
    """
    if mesh.size() == 1:
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    name, group = shared_name("mesh", *groups), groups[0]
    made = _named_group(mesh.mesh.flatten().tolist(), name, dist.get_backend(group), timeout_of(group))
    destroy_with(owner, [made])
    return made


def _named_group(ranks: list[int], name: str, backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        distributed_c10d._get_default_store(),
        cast(Any, name),
        timeout=timeout or distributed_c10d.default_pg_timeout,
    )
    assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
    distributed_c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    if backend == dist.Backend.GLOO:
        # Ranks connect above; one that still does would fail if another one were through and deleted its model.
        dist.barrier(made)
    return made


@real_values()
def _over_own_group(axis: Axis, groups: list[dist.ProcessGroup]) -> Axis:
    if axis.group is None:
        return axis
    name = shared_name("own", *(() if is_simulated(axis.group) else (axis.group,)))
    timeout = timeout_of(axis.group)
    if _is_split_from_others(axis.group):
        made = dist.split_group(axis.group, [list(range(axis.num_ranks))], timeout=timeout)
    else:
        made = duplicate_group(axis.group, name, timeout=timeout)
    assert made is not None, "this rank is one of them"
    groups.append(made)
    return replace(axis, group=made, rank=dist.get_rank(made))


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's collectives; None if its back end has no such attribute."""
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def _is_split_from_others(group: dist.ProcessGroup) -> bool:
    """Return True if torch would split a new NCCL group off the default one, which is collective over all ranks."""
    device = distributed_c10d._get_default_group().bound_device_id
    if device is None or device.type not in {kind.type for kind in group._device_types}:
        return False
    return bool(group._get_backend(device).supports_splitting)


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    """Destroy groups on this rank only; other ranks may do so later, or never."""
    for group in groups:
        if not dist.is_initialized() or group not in distributed_c10d._world.pg_map:
            continue  # taken down already, with everything else
        if dist.get_backend(group) == dist.Backend.GLOO or is_simulated(group):
            dist.destroy_process_group(group)
        else:
            # NCCL's destroy waits for the ranks of the node, which may wait for this one in a collective of another
            # model, if the garbage collector runs here first. An abort needs that nothing is in flight.
            torch.accelerator.synchronize()
            distributed_c10d._abort_process_group(group)
    groups.clear()
