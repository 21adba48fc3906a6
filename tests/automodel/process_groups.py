"""Process groups that a test makes in a worker that lives on."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@contextmanager
def groups_destroyed() -> Iterator[None]:
    """Destroy the process groups that are made in the block; workers hold threads for each."""
    world = dist.distributed_c10d._world
    before = set(world.pg_map)
    try:
        yield
        dist.barrier()  # gloo fails on ranks that still connect while a peer closes
    finally:
        destroy([group for group in world.pg_map if group not in before])


def destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy groups of meshes.

    DTensor remembers what an operation gives, mesh included, and takes a later mesh of the same ranks and names for the
    same; its results would then have a mesh whose groups are gone.
    """
    for group in groups:
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
