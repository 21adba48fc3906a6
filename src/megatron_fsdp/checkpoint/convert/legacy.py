"""Tensors of old checkpoints that were stored as flattened cells, and how to read a box of the true tensor.

A tensor of shape (X, Y) that tensor and pipeline parallelism cut into blocks (x, y) was stored in the shape
(X/x, Y/y, x*y): one index per axis for the cell, and the elements of its block in a row. Any number of axes. The true
shape stands in the metadata (`nd_reformulated_orig_global_shape`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from megatron_fsdp.errors import CheckpointError

ReadBox = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(offsets, lengths) in the stored tensor -> its elements."""


@dataclass(frozen=True)
class Run:
    """A stretch of one cell that is contiguous in the file and a box of what is wanted.

    Attributes:
        cell: Indices of the cell.
        start: First element within the cell.
        offsets: Where it goes, relative to the wanted box.
        lengths: Of the box that it fills.
    """

    cell: tuple[int, ...]
    start: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Cells:
    """How a true tensor was cut.

    Attributes:
        grid: Number of cells per axis.
        block: Length of a cell per axis.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the true tensor."""
        return tuple(count * length for count, length in zip(self.grid, self.block, strict=True))

    @classmethod
    def of(cls, key: str, stored: Sequence[int], true_shape: Sequence[int]) -> Cells:
        """From the stored and the true shape.

        Raises:
            CheckpointError: They do not belong together.
        """
        grid, flat = tuple(stored[:-1]), tuple(stored[-1:])
        fits = len(grid) == len(true_shape) and all(
            count > 0 and size % count == 0 for size, count in zip(true_shape, grid, strict=True)
        )
        block = tuple(size // count for size, count in zip(true_shape, grid, strict=True)) if fits else ()
        if not fits or (math.prod(block),) != flat:
            raise CheckpointError(
                f"{key} is stored as flattened cells of shape {tuple(stored)}, which does not fit its true shape "
                f"{tuple(true_shape)}; the metadata is damaged"
            )
        return cls(grid, block)

    def runs(self, offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[Run]:
        """The stretches to read for a box of the true tensor; each element once, and no other."""
        if 0 in lengths:
            return
        touched = [
            range(start // size, (start + length - 1) // size + 1)
            for start, length, size in zip(offsets, lengths, self.block, strict=True)
        ]
        for cell in product(*touched):
            first = [max(o, c * b) for o, c, b in zip(offsets, cell, self.block, strict=True)]
            last = [min(o + n, (c + 1) * b) for o, n, c, b in zip(offsets, lengths, cell, self.block, strict=True)]
            yield from self._runs_in(cell, first, last, offsets)

    def _runs_in(
        self, cell: tuple[int, ...], first: Sequence[int], last: Sequence[int], origin: Sequence[int]
    ) -> Iterator[Run]:
        size = [b - a for a, b in zip(first, last, strict=True)]
        # Up to the last axis that is not taken whole, elements are contiguous only along that axis.
        partial = max((axis for axis, length in enumerate(size) if length != self.block[axis]), default=0)
        for index in product(*(range(a, b) for a, b in zip(first[:partial], last[:partial], strict=True))):
            where = [*index, *first[partial:]]
            inside = [at - c * b for at, c, b in zip(where, cell, self.block, strict=True)]
            start = 0
            for at, length in zip(inside, self.block, strict=True):
                start = start * length + at
            lengths = (*(1 for _ in index), *size[partial:])
            yield Run(cell, start, tuple(a - o for a, o in zip(where, origin, strict=True)), lengths)


def read_true_box(cells: Cells, read_stored: ReadBox, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """A box of the true tensor, read cell by cell; at most one stretch is held besides the result."""
    result: Tensor | None = None
    for run in cells.runs(offsets, lengths):
        numel = math.prod(run.lengths)
        stretch = read_stored((*run.cell, run.start), (*(1 for _ in run.cell), numel))
        if run.lengths == tuple(lengths):
            return stretch.reshape(run.lengths)
        if result is None:
            result = torch.empty(tuple(lengths), dtype=stretch.dtype)
        part = result
        for axis, (start, length) in enumerate(zip(run.offsets, run.lengths, strict=True)):
            part = part.narrow(axis, start, length)
        part.copy_(stretch.reshape(run.lengths))
        del stretch
    if result is None:
        return read_stored((0,) * (len(cells.grid) + 1), (0,) * (len(cells.grid) + 1)).reshape(tuple(lengths))
    return result
