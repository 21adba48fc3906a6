"""Work that one rank does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_fsdp.checkpoint.ranks import gather_objects, rank_of, together

Result = TypeVar("Result")


def on_first_rank(doing: str, act: Callable[[], Result], group: dist.ProcessGroup | None) -> Result:
    """What a function returns on the first rank, on every rank; collective.

    Args:
        doing: As for `raise_together`.
        act: What to do, on the first rank only; makes no collective.
        group: The ranks.

    Raises:
        CheckpointError: It failed; on every rank.
    """
    mine = together(doing, lambda: act() if rank_of(group) == 0 else None, group)
    return gather_objects(mine, group)[0]
