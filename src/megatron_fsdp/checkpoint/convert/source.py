"""Opens a `torch_dist` checkpoint of any generation: tensors in their true shapes, common state, objects."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fsdp.checkpoint.archive import load_object
from megatron_fsdp.checkpoint.convert.entries import CommonState, Entry, Move
from megatron_fsdp.checkpoint.convert.plan import COMMON, Source, needed_objects
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.safe_read import Opaque, read_file, read_json
from megatron_fsdp.errors import CheckpointError

ReadBox = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(offsets, lengths) in the stored tensor -> its elements."""

_COMMON_KEY = f"{COMMON}/shard_0_1"
_TRUE_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class Run:
    """A range of one cell that is contiguous in the file and a box of what is wanted.

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
    """How a tensor of the true shape is cut into cells.

    Attributes:
        grid: Number of cells per axis.
        block: Length of a cell per axis.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the true tensor."""
        return tuple(count * length for count, length in zip(self.grid, self.block, strict=True))

    @classmethod
    def of(cls, key: str, stored: Sequence[int], true_shape: Sequence[int]) -> Cells:
        """Derive the cells from the stored and the true shape.

        Raises:
            CheckpointError: The shapes do not fit each other.
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
        """Yield the ranges to read for a box of the true tensor; each element once, and no other."""
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
    """Read a box of the true tensor cell by cell; at most one range is held besides the result."""
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


@dataclass(frozen=True)
class TorchDistSource:
    """An opened `torch_dist` checkpoint.

    Attributes:
        folder: Its metadata, tensors and objects.
        content: What a plan is made from.
        cells: Key -> how it was cut, for tensors that are stored as flattened cells.
    """

    folder: CheckpointFolder
    content: Source
    cells: Mapping[str, Cells]

    @classmethod
    def open(cls, path: Path) -> TorchDistSource:
        """Open a checkpoint.

        Raises:
            CheckpointError: It is not a complete `torch_dist` checkpoint, is damaged, or holds what is not read.
        """
        _require_marker(path)
        folder = CheckpointFolder(path)
        cells = _find_cells(folder)
        entries = [
            Entry(key, cells[key].shape if key in cells else tuple(entry.shape), entry.dtype)
            for key, entry in folder.tensors.items()
        ]
        wanted = needed_objects(folder.objects)
        objects = {key: without_opaque(_only(folder.read_object(key))) for key in wanted}
        common = CommonState.of(without_opaque(_read_common(folder, path)))
        return cls(folder, Source(entries, list(folder.objects), common, objects), cells)

    def read(self, move: Move) -> Tensor:
        """Read the elements of a move, in its shape, contiguous."""
        if move.source in self.cells:

            def stored(offsets: Any, lengths: Any) -> Tensor:
                return self.folder.read_box(move.source, offsets, lengths)

            found = read_true_box(self.cells[move.source], stored, move.offsets, move.lengths)
        else:
            found = self.folder.read_box(move.source, move.offsets, move.lengths)
        return found.reshape(move.shape)


def without_opaque(value: Any) -> Any:
    """Return a copy with text in place of objects of unknown classes, so that anyone can read it."""
    if isinstance(value, Opaque):
        return f"{value.qualified_name}({', '.join(map(str, value.arguments))})"
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**{name: without_opaque(inner) for name, inner in vars(value).items()})
    if isinstance(value, Mapping):
        return {without_opaque(key): without_opaque(inner) for key, inner in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(without_opaque(inner) for inner in value)
    return value


def _require_marker(path: Path) -> None:
    marker = path / "metadata.json"
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the iter_* folder of a torch_dist checkpoint")
    if not marker.is_file():
        inner = sorted(child.name for child in path.iterdir() if (child / "metadata.json").is_file())
        hint = f"; did you mean {path / inner[-1]}?" if inner else ""
        raise CheckpointError(
            f"{path} has no metadata.json, which torch_dist writes last: it is no torch_dist checkpoint, or an "
            f"incomplete one{hint}"
        )
    told = read_json(marker)
    backend = told.get("sharded_backend") if isinstance(told, dict) else None
    if backend != "torch_dist":
        raise CheckpointError(f"{marker} says that the format is {backend!r}; only torch_dist can be converted")


def _read_common(folder: CheckpointFolder, path: Path) -> Any:
    if _COMMON_KEY in folder.objects:
        return _only(folder.read_object(_COMMON_KEY))
    old = path / "common.pt"
    if not old.is_file():
        raise CheckpointError(f"{path} has neither {_COMMON_KEY} nor common.pt; the checkpoint is incomplete")
    return load_object(read_file(old), str(old))


def _only(content: Any) -> Any:
    """Unwrap an object, which Megatron stores as a list of one."""
    return content[0] if isinstance(content, list) and len(content) == 1 else content


def _find_cells(folder: CheckpointFolder) -> dict[str, Cells]:
    told = getattr(folder.metadata, "mcore_data", None) or {}
    if not isinstance(told, Mapping):
        raise CheckpointError(
            f"{folder.path}: mcore_data is a {type(told).__name__}, not a dict; the metadata is damaged"
        )
    found: dict[str, Cells] = {}
    for key, entry in folder.tensors.items():
        about = told.get(key)
        shape = about.get(_TRUE_SHAPE) if isinstance(about, Mapping) else None
        if shape is not None:
            found[key] = Cells.of(key, tuple(entry.shape), tuple(int(size) for size in shape))
    return found
