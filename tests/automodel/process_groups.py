"""Process groups that a test makes in a worker that lives on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def groups_destroyed() -> Iterator[None]:
    """Destroy the process groups that are made in the block; workers hold threads for each."""
    world = dist.distributed_c10d._world
    before = set(world.pg_map)
    try:
        yield
    finally:
        for group in [group for group in world.pg_map if group not in before]:
            dist.destroy_process_group(group)
