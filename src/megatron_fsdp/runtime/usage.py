"""Which parameters got a gradient on any rank.

A parameter that nobody used keeps `.grad` None, as on one process, so that weight decay and momentum leave it alone.
No rank of several can know that by itself, so the ranks agree after the first backward. Where every parameter was
used, which is the rule, they never ask again (and a parameter that goes unused later has a zero gradient); else they
agree after every backward. `find_unused_parameters=True` makes them ask every time: one small collective, and one wait
for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.real_values import real_values
from megatron_fsdp.errors import ScheduleError


class UsageAgreement:
    """Agrees over one group of ranks which parameters were used.

    Args:
        group: The ranks; None for a single one.
        device: Where the flags travel.
        always: Ask at every sync, also after all parameters were used once.
        foreign_groups: Ranks that hold other parameters in the place of these, as expert-parallel ranks do: where any
            of them shows a gradient all do, so that a norm that crosses them is met by all. They ask at every sync.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        always: bool = False,
        foreign_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self._group = group
        self._always = always or bool(foreign_groups)
        self._foreign_groups = tuple(foreign_groups)
        self._device = device
        self._all_used = False

    def ask_again(self) -> None:
        """Other parameters take gradients from now on."""
        self._all_used = False

    @real_values()
    def agree(self, used_here: Sequence[bool], fingerprint: int) -> list[bool]:
        """Whether any rank used each parameter.

        Args:
            used_here: For each parameter, in the order that all ranks share, whether this rank computed a gradient.
            fingerprint: Of the communication so far; has to be the same on every rank. Below 2 ** 62.

        Raises:
            ScheduleError: On every rank, where ranks gathered or reduced different units.
        """
        if self._all_used:
            return [True] * len(used_here)
        if self._group is None:  # nothing has to travel, so that the host waits for no device
            return self._show_one(list(used_here))
        flags = torch.tensor([*used_here, fingerprint, -fingerprint], dtype=torch.int64, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        *found, highest, minus_lowest = flags.tolist()
        if highest != -minus_lowest:
            raise ScheduleError(
                "ranks gathered or reduced different units, so weights or gradients of different units were mixed; "
                "every rank has to call the same units in the same order, and one that has nothing to compute with a "
                "unit calls model.take_part(unit, hidden) in its place; MFSDP_VERIFY_RANKS=1 names the first "
                "difference (docs/ranks.md)"
            )
        used = [bool(flag) for flag in found]
        self._all_used = all(used) and not self._always
        return self._show_one(used)

    def _show_one(self, used: list[bool]) -> list[bool]:
        """Count the first parameter as used (its gradient is zero) where none is, and some foreign rank has one."""
        if not self._foreign_groups:
            return used
        anything = torch.tensor([any(used)], dtype=torch.int32, device=self._device)
        for group in self._foreign_groups:
            dist.all_reduce(anything, op=dist.ReduceOp.MAX, group=group)
        return used if any(used) or not bool(anything.item()) else [True, *used[1:]]
