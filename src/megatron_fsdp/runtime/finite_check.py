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
        names: Every trainable parameter, in the order that all ranks share.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.
        device: Where the flags live.
    """

    def __init__(self, names: Sequence[str], groups: Sequence[dist.ProcessGroup | None], device: torch.device) -> None:
        self._names = tuple(names)
        self._position = {name: index for index, name in enumerate(names)}
        self._groups = [group for group in groups if group is not None]
        self._flags = torch.zeros(len(names), dtype=torch.bool, device=device)
        here = dist.get_rank() if self._groups else 0
        self._ranks = self._gather(torch.tensor([here], dtype=torch.int64, device=device)).tolist()

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """What every rank of the groups has, one after another."""
        for group in self._groups:
            seen = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(seen, mine, group=group)
            mine = torch.cat(seen)
        return mine

    def look_at(self, name: str, grad: torch.Tensor) -> None:
        """Note whether a gradient holds a value that is not finite; nothing is read back."""
        self._flags[self._position[name]] |= ~torch.isfinite(grad).all()

    def conclude(self) -> None:
        """Compare over the ranks and start afresh.

        Raises:
            NonFiniteGradientError: Some rank saw NaN or infinity; the message names parameters and ranks.
        """
        mine = self._flags.to(torch.uint8)
        self._flags.zero_()
        mine = self._gather(mine)
        by_rank = mine.view(-1, len(self._names)).bool().cpu()
        bad = [index for index in range(len(self._names)) if bool(by_rank[:, index].any())]
        if not bad:
            return
        shown = [f"{self._names[i]} on rank {self._ranks_where(by_rank[:, i])}" for i in bad[:_NAMES_SHOWN]]
        more = f" and {len(bad) - len(shown)} more" if len(bad) > len(shown) else ""
        raise NonFiniteGradientError(
            f"the gradients of {len(bad)} parameters hold NaN or infinity before reduction: {'; '.join(shown)}{more} "
            "(global ranks); look at loss and learning rate, then call zero_grad and go on or stop"
        )

    def _ranks_where(self, flags: torch.Tensor) -> list[int]:
        return sorted(rank for rank, flag in zip(self._ranks, flags.tolist(), strict=True) if flag)
