"""What of a model lies in memory that ranks of one machine share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_fsdp.comm.lanes import Lane, Ticket
from megatron_fsdp.engine.pools import Block, BucketPool
from megatron_fsdp.engine.unit import Unit


def bucket_pool(count: int, units: Sequence[Unit], device: torch.device, make_room: Callable[[], bool]) -> BucketPool:
    """Buckets for some units: in memory that ranks share, where they read what they reduce from there.

    The first of these keeps its memory from backward to backward. Every backward begins with one, so the most that is
    taken at a time does not grow, and pages of memory that is shared do not come from malloc, which keeps some.
    """
    make_block, kept = _block_maker(units, device)
    num_bytes = max((unit.bucket_bytes for unit in units), default=0)
    return BucketPool(count, num_bytes, make_block, make_room, kept)


def _block_maker(units: Sequence[Unit], device: torch.device) -> tuple[Callable[[int], Block], int]:
    for plan in (group.plan for unit in units for group in unit.groups):
        scatters = plan.inner_gradient_region.numel < plan.layout.numel
        if plan.axis.shared is not None and plan.requires_grad and scatters:
            return plan.axis.shared.block, 1
    return partial(Block, device=device), 0


class Passes:
    """Forwards and backwards that all ranks begin and end together, since they read each other's weights in them.

    It is false where no weights are shared.

    Args:
        units: All units.
        lane: Where ranks wait for each other.
    """

    def __init__(self, units: Sequence[Unit], lane: Lane) -> None:
        plans = (group.plan for unit in units for group in unit.groups if group.plan.shares_weights)
        found = {id(plan.axis.shared): plan.axis.shared for plan in plans}
        self._shared = tuple(shared for shared in found.values() if shared is not None)
        self._lane = lane

    def __bool__(self) -> bool:
        return bool(self._shared)

    def begin(self, steps: int) -> None:
        """Wait until the weights of all are up to date.

        Args:
            steps: Of optimizers so far; has to be the same on all ranks.
        """
        self._wait([self._lane.submit(partial(shared.begin_pass, steps)) for shared in self._shared])

    def end(self) -> None:
        """Wait until nobody reads them."""
        self._wait([self._lane.submit(shared.end_pass) for shared in self._shared])

    @staticmethod
    def _wait(tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.wait()
