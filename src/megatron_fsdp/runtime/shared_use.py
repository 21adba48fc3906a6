"""What of a model lies in memory that ranks of one machine share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_fsdp.buffer.pools import Block, BucketPool
from megatron_fsdp.buffer.shared_memory import SharedMemory
from megatron_fsdp.unit.unit import Unit


def bucket_pool(count: int, units: Sequence[Unit], device: torch.device, make_room: Callable[[], bool]) -> BucketPool:
    """Buckets for some units: in memory that ranks share, where they read what they reduce from there.

    The first of these keeps its memory from backward to backward. Every backward begins with one, so the most that is
    taken at a time does not grow, and pages of memory that is shared do not come from malloc, which keeps some.
    """
    make_block, kept = _block_maker(units, device)
    num_bytes = max((unit.bucket_bytes for unit in units), default=0)
    return BucketPool(count, num_bytes, make_block, make_room, kept)


def _block_maker(units: Sequence[Unit], device: torch.device) -> tuple[Callable[[int], Block], int]:
    for unit in units:
        for group in unit.groups:
            shared = group.plan.axis.shared
            if shared is not None and group.gradients is not None and group.gradients.reducer.scatters_inside:
                return shared.block, 1
    return partial(Block, device=device), 0


def sharers(units: Sequence[Unit]) -> tuple[SharedMemory, ...]:
    """Where the weights of units lie that all inner ranks read where they are."""
    plans = (group.plan for unit in units for group in unit.groups if group.plan.shares_weights)
    found = {id(plan.axis.shared): plan.axis.shared for plan in plans}
    return tuple(shared for shared in found.values() if shared is not None)
