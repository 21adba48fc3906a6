"""Find NaN and infinity in gradients before they are reduced, and say on every rank whose they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.errors import NonFiniteGradientError

_NAMES_SHOWN = 8


class FiniteCheck:
    """Collects one flag per parameter during backward; the ranks compare them when it ends.

    Args:
        names: Every trainable parameter of this rank; expert-parallel ranks may have others, and another number.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.
        device: Where the flags live.
    """

    def __init__(self, names: Sequence[str], groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
        self._position = {name: index for index, name in enumerate(names)}
        self._groups = [group for group in groups if group is not None]
        self._owners = self._everyone(dist.get_rank() if self._groups else 0, tuple(names))
        count = max(len(of_rank) for _, of_rank in self._owners)
        self._flags = torch.zeros(count, dtype=torch.bool, device=device)

    def _everyone(self, rank: int, names: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
        """The global rank and the names of each rank, in the order in which `conclude` gathers flags."""
        known = [(rank, names)]
        for group in self._groups:
            parts: list[list[tuple[int, tuple[str, ...]]]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(parts, known, group=group)
            known = [entry for part in parts for entry in part]
        return known

    def look_at(self, name: str, grad: torch.Tensor) -> None:
        """Note whether a gradient holds a value that is not finite; nothing is read back."""
        self._flags[self._position[name]] |= ~torch.isfinite(grad).all()

    def conclude(self) -> None:
        """Compare over the ranks and start afresh.

        Raises:
            NonFiniteGradientError: Some rank saw NaN or infinity; the message names parameters and ranks.
        """
        gathered = self._flags.to(torch.uint8)
        self._flags.zero_()
        for group in self._groups:
            parts = [torch.empty_like(gathered) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, gathered, group=group)
            gathered = torch.cat(parts)
        by_rank = gathered.view(len(self._owners), -1).bool().cpu()
        if bool(by_rank.any()):
            raise NonFiniteGradientError(self._message(by_rank.tolist()))

    def _message(self, by_rank: Sequence[Sequence[bool]]) -> str:
        bad: dict[str, set[int]] = {}
        for (rank, names), flags in zip(self._owners, by_rank, strict=True):
            for name, flag in zip(names, flags, strict=False):  # flags of fewer names are padded
                if flag:
                    bad.setdefault(name, set()).add(rank)
        shown = [f"{name} on rank {sorted(ranks)}" for name, ranks in list(bad.items())[:_NAMES_SHOWN]]
        more = f" and {len(bad) - len(shown)} more" if len(bad) > len(shown) else ""
        return (
            f"the gradients of {len(bad)} parameters hold NaN or infinity before reduction: {'; '.join(shown)}{more} "
            "(global ranks); look at loss and learning rate, then call zero_grad and go on or stop"
        )
