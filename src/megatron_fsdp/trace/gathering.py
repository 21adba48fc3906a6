"""Ranks that begin to record together: one name for the recording, and who takes part."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch.distributed as dist

from megatron_fsdp.comm.axis import real_values


@real_values()
def name_together(groups: Sequence[dist.ProcessGroup | None]) -> tuple[str, frozenset[int]]:
    """Agree on the name of a recording; one small collective for each group.

    Args:
        groups: One after another they reach all ranks of the model; None: this rank alone.

    Returns:
        The name, never used before, and the global ranks; the same on all of them.
    """
    name, ranks = uuid.uuid4().hex, frozenset({dist.get_rank()})
    for group in groups:
        if group is None:
            continue
        found = [(name, ranks)] * dist.get_world_size(group)
        dist.all_gather_object(found, (name, ranks), group=group)
        # The least of all names, so that ranks that meet in different groups end with the same.
        name = min(other for other, _ in found)
        ranks = frozenset().union(*(those for _, those in found))
    return name, ranks
