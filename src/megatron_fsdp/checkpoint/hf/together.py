"""Work of which every rank learns whether it went well."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_fsdp.checkpoint.ranks import gather_objects, raise_together, rank_of

Result = TypeVar("Result")


def together(work: Callable[[], Result], doing: str, group: dist.ProcessGroup | None) -> Result:
    """Do something on every rank and raise on all of them what any met; collective.

    Args:
        work: Not collective itself, or so that all ranks come to its end.
        doing: As of `raise_together`.
        group: The ranks.

    Raises:
        CheckpointError: A rank has failed; the same message on every rank.
    """
    result, problem = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 (told to all ranks)
        problem = error
    raise_together(problem, doing, group)
    return result  # type: ignore[return-value]


def on_first_rank(work: Callable[[], Result], doing: str, group: dist.ProcessGroup | None) -> Result:
    """What a function returns on the first rank, on every rank; collective.

    Raises:
        CheckpointError: It failed; on every rank.
    """
    mine = together(lambda: work() if rank_of(group) == 0 else None, doing, group)
    return gather_objects(mine, group)[0]
