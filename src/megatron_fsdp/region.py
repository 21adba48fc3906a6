"""Which stretch of a flat buffer a rank holds, from the placement on each mesh axis. Pure.

A buffer that is sharded over several axes is cut over the innermost first, and each part then over the next one out,
so that what one inner rank holds for all outer ranks is contiguous: with N inner and M outer ranks, the owner of shard
number s of N * M is inner rank s // M, outer rank s % M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.placement import Placement


class AxisPosition(Protocol):
    """Where a rank stands on one axis."""

    @property
    def rank(self) -> int:
        """Position, 0 <= rank < num_ranks."""

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""


@dataclass(frozen=True)
class Region:
    """Elements [start, stop) of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def within(self, outer: Region) -> slice:
        """Where these elements lie in the memory of a region that contains them."""
        return slice(self.start - outer.start, self.stop - outer.start)


def held_region(numel: int, placements: Sequence[Placement], axes: Sequence[AxisPosition]) -> Region:
    """What a rank holds of a flat buffer.

    Args:
        numel: Elements of the whole buffer; divisible by the ranks of all axes that shard it.
        placements: One per axis, outermost first.
        axes: This rank's position on each.

    Returns:
        Everything, unless an axis says `SHARD`.

    Raises:
        ConfigurationError: The buffer cannot be cut into equal parts.
    """
    start, length = 0, numel
    for placement, axis in zip(reversed(placements), reversed(axes), strict=True):
        if placement is Placement.SHARD:
            if length % axis.num_ranks:
                raise ConfigurationError(
                    f"{length} elements cannot be cut into {axis.num_ranks} equal parts; pad the layout to a multiple."
                )
            length //= axis.num_ranks
            start += axis.rank * length
    return Region(start, start + length)


def shard_count(placements: Sequence[Placement], axes: Sequence[AxisPosition]) -> int:
    """Into how many parts the axes cut a buffer together."""
    count = 1
    for placement, axis in zip(placements, axes, strict=True):
        count *= axis.num_ranks if placement is Placement.SHARD else 1
    return count
