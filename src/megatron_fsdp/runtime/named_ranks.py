"""The parameters of every rank under the names that messages use, for checks in which a rank speaks for its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.real_values import real_values

_SHOWN = 8


class NamedRanks:
    """Who has which parameters. Making one is collective.

    Args:
        names: Parameters of this rank; expert-parallel ranks may have others, and another number.
        labels: Where a parameter travels, by its name: the unit or bucket; None, or no entry: nothing is said of it.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.

    Attributes:
        everyone: The global rank and the parameters of each rank, each as "name (label)", in the order of `gather`.
        most: The largest number of parameters of any rank.
    """

    def __init__(
        self, names: Sequence[str], labels: Mapping[str, str] | None, groups: Sequence[dist.ProcessGroup | None]
    ) -> None:
        self._groups = [group for group in groups if group is not None]
        self.own = tuple(f"{name} ({labels[name]})" if labels and name in labels else name for name in names)
        self.everyone = self._meet(dist.get_rank() if self._groups else 0)
        self.most = max(len(of_rank) for _, of_rank in self.everyone)

    @real_values()
    def _meet(self, rank: int) -> list[tuple[int, tuple[str, ...]]]:
        known = [(rank, self.own)]
        for group in self._groups:
            parts: list[list[tuple[int, tuple[str, ...]]]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(parts, known, group=group)
            known = [entry for part in parts for entry in part]
        return known

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """What every rank has, (ranks, most); `mine` is (most,) on each. Collective."""
        gathered = mine
        for group in self._groups:
            parts = [torch.empty_like(gathered) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, gathered, group=group)
            gathered = torch.cat(parts)
        return gathered.view(len(self.everyone), -1)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over all ranks, elementwise and in place; the same on every rank. Collective."""
        for group in self._groups:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values

    def ranks_by_name(self, flags: Sequence[Sequence[bool]]) -> dict[str, list[int]]:
        """The global ranks, ascending, that raised a flag for a parameter; those that nobody flagged are left out.

        Args:
            flags: By rank and position, as `gather` gives them.
        """
        found: dict[str, set[int]] = {}
        for (rank, names), of_rank in zip(self.everyone, flags, strict=True):
            for name, flag in zip(names, of_rank, strict=False):  # flags of fewer names are padded
                if flag:
                    found.setdefault(name, set()).add(rank)
        return {name: sorted(ranks) for name, ranks in found.items()}


def first_few(told: Iterable[str]) -> str:
    """The first findings as text, and how many more there are."""
    findings = list(told)
    more = f" and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    return "; ".join(findings[:_SHOWN]) + more
