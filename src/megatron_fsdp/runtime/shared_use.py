"""What of a model lies in memory that ranks of one machine share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_fsdp.buffer.pools import Block
from megatron_fsdp.buffer.shared_memory import SharedMemory
from megatron_fsdp.unit.unit import Unit


def block_maker(units: Sequence[Unit], device: torch.device) -> Callable[[int], Block]:
    """What makes buckets for some units: in memory that ranks share, where they read what they reduce from there."""
    for unit in units:
        for group in unit.groups:
            shared = group.plan.axis.shared
            if shared is not None and group.gradients is not None and group.gradients.reducer.scatters_inside:
                return shared.block
    return partial(Block, device=device)


def sharers(units: Sequence[Unit]) -> tuple[SharedMemory, ...]:
    """Where the weights of units lie that all inner ranks read where they are."""
    plans = (group.plan for unit in units for group in unit.groups if group.plan.shares_weights)
    found = {id(plan.axis.shared): plan.axis.shared for plan in plans}
    return tuple(shared for shared in found.values() if shared is not None)
