"""Which tokens of a sequence each context-parallel rank has; pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fsdp.errors import ParallelSizeError


@dataclass(frozen=True)
class SequenceLayout:
    """How sequences are cut.

    With causal attention a token costs as much as there are tokens before it. So by default the sequence is cut into
    2 * ranks pieces, and rank r has the pieces r and 2 * ranks - 1 - r, one cheap and one dear: all ranks have the
    same work. This is the order of torch's `_HeadTailLoadBalancer`. Without balancing rank r has piece r of as many
    pieces as there are ranks.

    Attributes:
        ranks: Number of context-parallel ranks.
        load_balance: Two pieces per rank in place of one.
    """

    ranks: int
    load_balance: bool = True

    @property
    def num_pieces(self) -> int:
        """Into how many pieces of equal length a sequence is cut."""
        return self.ranks * (2 if self.load_balance else 1)

    def check_length(self, length: int) -> None:
        """Refuse sequences that cannot be cut into equal pieces.

        Raises:
            ParallelSizeError: `length`, in tokens of the whole sequence, does not divide.
        """
        if length > 0 and length % self.num_pieces == 0:
            return
        pieces = f"2 * {self.ranks} = {self.num_pieces}" if self.load_balance else str(self.num_pieces)
        padded = max(-(-length // self.num_pieces), 1) * self.num_pieces
        raise ParallelSizeError(
            f"sequences of {length} tokens cannot be cut into {pieces} equal pieces for cp_size={self.ranks} with "
            f"load_balance={self.load_balance}; pad them to {padded} tokens with labels of -100"
        )

    def pieces_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of the pieces of a rank, in the order in which it has them."""
        return (rank, self.num_pieces - 1 - rank) if self.load_balance else (rank,)

    def ranges_of(self, rank: int, local_length: int) -> list[tuple[int, int]]:
        """(first, last + 1) position in the whole sequence of each piece of a rank that has `local_length` tokens."""
        pieces = self.pieces_of(rank)
        size = local_length // len(pieces)
        return [(piece * size, (piece + 1) * size) for piece in pieces]

    def positions_of(self, rank: int, local_length: int, device: torch.device | None = None) -> Tensor:
        """Position in the whole sequence of each token of a rank, int64, (local_length,)."""
        ranges = self.ranges_of(rank, local_length)
        return torch.cat([torch.arange(start, end, device=device) for start, end in ranges])

    def cut(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """What a rank has of a tensor whose dimension `dim` is the whole sequence; a copy."""
        ranges = self.ranges_of(rank, whole.shape[dim] // self.ranks)
        return torch.cat([whole.narrow(dim, start, end - start) for start, end in ranges], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole sequence, in order, from what each rank has; the reverse of `cut`."""
        found: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            pieces = self.pieces_of(rank)
            found.update(zip(pieces, part.chunk(len(pieces), dim), strict=True))
        return torch.cat([found[piece] for piece in range(self.num_pieces)], dim)
