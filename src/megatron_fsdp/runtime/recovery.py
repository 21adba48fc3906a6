"""After an exception ranks may have stopped at different points; what they hold for later has to be alike again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.runtime.domain import Domain
from megatron_fsdp.unit.param_group import ParameterGroup


def match_deferred_sums(groups: Sequence[ParameterGroup], domain: Domain, device: torch.device) -> None:
    """Let every rank hold deferred sums for the same groups, so that all reduce the same later. Collective.

    Args:
        groups: Trainable groups that share a domain, in an order that all ranks share.
        domain: Their ranks.
        device: Where the flags travel.
    """
    gradients = [group.gradients for group in groups if group.gradients is not None]
    if domain.group is None or not gradients:
        return
    flags = torch.tensor(
        [[each.has_deferred, each.has_pending] for each in gradients], dtype=torch.int32, device=device
    )
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=domain.group)
    for each, (deferred, pending) in zip(gradients, flags.tolist(), strict=True):
        each.ensure_sums(bool(deferred), bool(pending))
