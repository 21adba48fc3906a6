"""Find NaN and infinity in gradients before they are reduced, and say on every rank whose they are.

Gradients are looked at twice: as they arrive, and as they are about to travel. A sum of deferred microbatches, or the
cast to the dtype of the main gradients or of the wire, can make infinity of values that were finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_fsdp.buffer.real_values import has_values
from megatron_fsdp.errors import NonFiniteGradientError
from megatron_fsdp.runtime.named_ranks import NamedRanks, first_few


class FiniteCheck:
    """Collects one flag per parameter during backward; the ranks compare them when it ends.

    Args:
        names: Every trainable parameter of this rank; expert-parallel ranks may have others, and another number.
        groups: The ranks, data-parallel ones first, then tensor-parallel ones; None for a single one.
        device: Where the flags live.
        labels: The unit or bucket of each parameter, for messages.
    """

    def __init__(
        self,
        names: Sequence[str],
        groups: Sequence[dist.ProcessGroup | None],
        device: torch.device,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._position = {name: index for index, name in enumerate(names)}
        self._ranks = NamedRanks(names, labels, groups)
        self._flags = torch.zeros(self._ranks.most, dtype=torch.bool, device=device)

    def begin(self) -> None:
        """A backward, or a sync outside of one, begins; what an earlier one that failed has left is forgotten."""
        self._flags.zero_()

    def look_at(self, name: str, grad: torch.Tensor) -> None:
        """Note whether a gradient holds a value that is not finite; nothing is read back."""
        self._flags[self._position[name]] |= ~torch.isfinite(grad).all()

    def conclude(self) -> None:
        """Compare over the ranks.

        Raises:
            NonFiniteGradientError: Some rank saw NaN or infinity; the message names parameters and ranks.
        """
        by_rank = self._ranks.gather(self._flags.to(torch.uint8)).bool().cpu()
        if has_values(by_rank) and bool(by_rank.any()):
            raise NonFiniteGradientError(self._message(by_rank.tolist()))

    def _message(self, by_rank: Sequence[Sequence[bool]]) -> str:
        bad = self._ranks.ranks_by_name(by_rank)
        told = first_few(f"{name} on rank {ranks}" for name, ranks in bad.items())
        return (
            f"the gradients of {len(bad)} parameters hold NaN or infinity before reduction: {told} "
            "(global ranks); look at loss and learning rate, then call zero_grad and go on or stop"
        )
