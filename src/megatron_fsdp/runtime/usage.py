"""Which parameters got a gradient on any rank.

A parameter that nobody used keeps `.grad` None, as on one process, so that weight decay and momentum leave it alone.
No rank can know that by itself, so the ranks agree after the first backward. Where every parameter was used, which is
the rule, they never ask again (and a parameter that goes unused later has a zero gradient); else they agree after
every backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class UsageAgreement:
    """Agrees over one group of ranks which parameters were used.

    Args:
        group: The ranks; None for a single one.
        device: Where the flags travel.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._all_used = False

    def agree(self, used_here: Sequence[bool]) -> list[bool]:
        """Whether any rank used each parameter.

        Args:
            used_here: For each parameter, in the order that all ranks share, whether this rank computed a gradient.
        """
        if self._all_used:
            return [True] * len(used_here)
        flags = torch.tensor(used_here, dtype=torch.uint8, device=self._device)
        if self._group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        used = [bool(flag) for flag in flags.tolist()]
        # A single rank knows without asking, so it never has to settle for zeros.
        self._all_used = all(used) and self._group is not None
        return used
