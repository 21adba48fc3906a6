"""What ranks agree on about gradients: which parameters any rank used, and which deferred sums there are to reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.engine.gradients import GradientBuffers
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.sharding.mesh import Domain

# A parameter that no rank used keeps `.grad` None, as on one process, so that weight decay and momentum leave it
# alone. A rank cannot know that by itself, so the ranks agree at the first sync. Where every parameter was
# used, which is the rule, they never ask again (and a parameter that goes unused later has a zero gradient); else they
# agree at every sync. `find_unused_parameters=True` makes them ask every time: one small collective, and one
# wait for it.


class UsageAgreement:
    """Agrees over one group of ranks which parameters got a gradient on any rank.

    Args:
        group: The ranks; None for a single one.
        device: Where the flags travel.
        always: Ask at every sync, also after all parameters were used once.
        foreign_groups: Ranks that hold other parameters in the place of these, as expert-parallel ranks do: if any of
            them shows a gradient, all do, so that all join a norm that spans them. They ask at every sync.
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

    @property
    def asks(self) -> bool:
        """Whether the next sync asks the other ranks, and waits for their answer."""
        return self._group is not None and not self._all_used

    def forget(self) -> None:
        """Ask at the next sync, since other parameters take gradients now."""
        self._all_used = False

    @real_values()
    def agree(self, used_here: Sequence[bool], operations_digest: int) -> list[bool]:
        """Return whether any rank used each parameter.

        Args:
            used_here: For each parameter, in the order that all ranks share, whether this rank computed a gradient.
            operations_digest: Of the gathers and reductions so far; has to be the same on every rank. Below 2 ** 62.

        Raises:
            ScheduleError: On every rank, where ranks gathered or reduced different units.
        """
        if self._all_used:
            return [True] * len(used_here)
        if self._group is None:  # nothing to send, so no device sync
            return self._show_one(list(used_here))
        flags = torch.tensor(
            [*used_here, operations_digest, -operations_digest], dtype=torch.int64, device=self._device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        *found, highest, minus_lowest = flags.tolist()
        if highest != -minus_lowest:
            raise ScheduleError(
                "ranks gathered or reduced different units, so weights or gradients of different units were mixed; "
                "every rank has to call the same units in the same order, and one that has nothing to compute with a "
                "unit calls model.take_part(unit, hidden) in its place; MFSDP_VERIFY_RANKS=1 names the first "
                "difference (docs/debugging.md)"
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


def match_waiting_sums(gradients: Sequence[GradientBuffers], domain: Domain, device: torch.device) -> None:
    """Make every rank hold sums that wait for the same groups, so that all reduce the same later. Collective."""
    if domain.group is None or not gradients:
        return
    flags = torch.tensor(
        [[each.has_deferred_sum, each.has_inner_sum] for each in gradients], dtype=torch.int32, device=device
    )
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=domain.group)
    for each, (deferred, inner) in zip(gradients, flags.tolist(), strict=True):
        each.ensure_sums(bool(deferred), bool(inner))
