"""Experts that differ between ranks and have the same name cannot be told apart in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.unit.param_group import ParameterGroup


def mark_ambiguous_experts(groups: Sequence[ParameterGroup], experts: Domain) -> None:
    """Let experts that share their name with others on other ranks say so when they are saved or loaded. Collective.

    Args:
        groups: All parameter groups.
        experts: The ranks of experts.
    """
    mine = [group for group in groups if group.plan.spec.key.is_expert]
    names = {name for group in mine for name in group.names}
    shared: set[str] = set()
    for ranks in experts.foreign_groups:
        everyone: list[set[str]] = [set()] * dist.get_world_size(ranks)
        dist.all_gather_object(everyone, names, group=ranks)
        here = dist.get_rank(ranks)
        shared.update(*(names & other for rank, other in enumerate(everyone) if rank != here))
    for group in mine:
        for name, frame in zip(group.names, group.frames, strict=True):
            if name in shared:
                frame.problem = (
                    f"{name} is another expert on other expert-parallel ranks under the same name, so a checkpoint "
                    "would keep one of them; name experts by their index over all ranks, or save each expert-parallel "
                    "rank's experts by itself"
                )
