"""Pools of borrowed memory, and how many units are gathered ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_fsdp.engine.memory import Block, BlockPool, CommunicationPool
from megatron_fsdp.engine.memory_plan import Use, prefetch_depth
from megatron_fsdp.errors import ConfigurationError

CPU = torch.device("cpu")


POOL = CommunicationPool(CPU)


def room_maker(pool_of: Callable[[], BlockPool], lent: list[Block], log: list[str]) -> Callable[[], bool]:
    """Gives the oldest lent block back, as the end of a reduction does."""

    def make_room() -> bool:
        log.append("asked")
        if not lent:
            return False
        pool_of().give_back(lent.pop(0))
        return True

    return make_room


def test_an_end_waits_for_its_neighbour_and_its_neighbour_for_it() -> None:
    lent: list[Block] = []
    log: list[str] = []
    pool = BlockPool(POOL, Use.BUCKET, 2, [64, 64, 96], room_maker(lambda: pool, lent, log))
    for num_bytes, held in ((96, 96), (64, 64), (64, 128), (96, 96)):  # a head, two blocks, an embedding
        lent.append(pool.borrow(num_bytes))
        assert sum(block.held_bytes for block in lent) == held
    assert len(log) == 3


def test_as_many_units_are_gathered_ahead_as_fit_whichever_they_are() -> None:
    depths = {0: 0, 1: 1, 30: 1, 49: 1, 50: 2, 60: 3, 10**12: 3}
    assert {numel: prefetch_depth(numel, [20, 30, 10]) for numel in depths} == depths
    assert prefetch_depth(100, []) == 0
    with pytest.raises(ConfigurationError) as caught:
        prefetch_depth(-1, [20])
    assert str(caught.value) == "-1 elements cannot be gathered ahead; give 0 (none) or more."
