"""The published layout of flat buffers, by the least common multiple of row lengths. Pure; the engine pads less."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_fsdp.sharding.layout import Layout


class LcmLayout(Layout):
    """A layout by multiples of the least common multiple of all row lengths, with its published names."""

    @property
    def tensor_shapes(self) -> tuple[torch.Size, ...]:
        """Shape of each tensor."""
        return tuple(map(torch.Size, self.shapes))

    @property
    def tensor_to_offset(self) -> tuple[int, ...]:
        """First element of each tensor in the whole buffer."""
        return self.offsets

    @property
    def size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.numel


def plan_lcm_layout(shapes: Sequence[Sequence[int]], num_ranks: int) -> LcmLayout:
    """Lay tensors out so that equal shards over any of the ranks' axes cut between rows.

    A chunk is the least common multiple of all row lengths. Tensors of a chunk or more are a number of chunks and a
    remainder of rows; in the gap behind one remainder lies that of the next tensor where it fits, just before its own
    chunks. Shorter tensors fill the gaps, the longest first, and go to the end where they fit in none.
    """
    numels = [math.prod(shape) for shape in shapes]
    rows = [max(1, math.prod(shape[1:])) for shape in shapes]
    chunk = math.lcm(*rows)
    offsets, gaps, position = [0] * len(numels), list[tuple[int, int]](), 0
    waiting = [index for index, numel in enumerate(numels) if numel >= chunk]
    while waiting:
        index = waiting.pop(0)
        offsets[index] = position
        stop = position + numels[index]
        position = _round_up(stop, chunk)
        for other in waiting:
            if 0 < numels[other] % chunk <= position - stop:
                waiting.remove(other)
                offsets[other] = position - numels[other] % chunk
                gaps.append((stop, offsets[other]))
                position = offsets[other] + numels[other]
                break
        else:
            gaps.append((stop, position))
    for index in sorted((i for i, numel in enumerate(numels) if numel < chunk), key=lambda i: -numels[i]):
        # At a multiple of its row, no edge of a shard, a multiple of the chunk, can cut inside a row.
        for place, (first, stop) in enumerate(gaps):
            start = _round_up(first, rows[index])
            if start + numels[index] <= stop:
                gaps[place] = (start + numels[index], stop)
                break
        else:
            start = _round_up(position, rows[index])
            position = start + numels[index]
        offsets[index] = start
    shard_numel = _round_up(position, chunk * num_ranks) // num_ranks
    return LcmLayout(tuple(tuple(map(int, shape)) for shape in shapes), tuple(offsets), num_ranks, shard_numel)


def _round_up(position: int, step: int) -> int:
    return -(-position // step) * step
