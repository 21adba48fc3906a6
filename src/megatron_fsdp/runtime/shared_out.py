"""Which ranks hold different pieces of one tensor, so that a total has to cross them."""

from __future__ import annotations

import torch.distributed as dist

from megatron_fsdp.placement import Placement
from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.unit.param_group import ParameterGroup

Groups = tuple[dist.ProcessGroup, ...]


def shared_out_over(group: ParameterGroup, index: int, domain: Domain) -> Groups:
    """The process groups that a main weight, and its gradient after the sync, is shared out over.

    Args:
        group: The parameter group.
        index: Of the parameter in it.
        domain: The ranks of the group's parameters.

    Returns:
        Along each the ranks hold different pieces; all other ranks hold copies. The same on every rank. For experts
        the groups along which experts differ are among them.
    """
    plan = group.plan
    over = [
        axis.group
        for axis, placement in zip(plan.axes, plan.placements.main_weight, strict=True)
        if placement is Placement.SHARD and axis.group is not None
    ]
    part = plan.parts[index]
    if part is not None and part.is_cut:
        over.append(part.mesh.get_group())
    if plan.spec.key.is_expert:
        over += domain.foreign_groups
    return tuple(over)
