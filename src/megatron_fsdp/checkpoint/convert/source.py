"""Opens a `torch_dist` checkpoint of any generation: tensors in their true shapes, common state, objects."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fsdp.checkpoint.convert.plan import CommonState, Entry, Move, Source, needed_objects
from megatron_fsdp.checkpoint.folder import CheckpointFolder, stretch_of
from megatron_fsdp.checkpoint.kinds import COMMON_FILE, COMMON_KEY, MARKER, read_common, read_marker
from megatron_fsdp.checkpoint.safe_read import Opaque
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

ReadBox = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(offsets, lengths) in the stored tensor -> its elements."""

_TRUE_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class Cells:
    """How a tensor of the true shape is cut into cells: how many along each axis, and how long they are."""

    grid: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the true tensor."""
        return tuple(count * length for count, length in zip(self.grid, self.block, strict=True))

    @classmethod
    def of(cls, key: str, stored: Sequence[int], true_shape: Sequence[int]) -> Cells:
        """Derive the cells from the stored and the true shape."""
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

    def meeting(self, wanted: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield the cells that a box of the true tensor meets, each with its share in the cell's coordinates."""
        touched = [
            range(start // size, (start + length - 1) // size + 1)
            for start, length, size in zip(wanted.offsets, wanted.lengths, self.block, strict=True)
        ]
        for cell in product(*touched) if wanted.numel else ():
            whole = Box(tuple(at * size for at, size in zip(cell, self.block, strict=True)), self.block)
            shared = whole.meet(wanted)
            assert shared is not None
            yield cell, shared.inside(whole)


def read_true_box(cells: Cells, read_stored: ReadBox, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Read a box of the true tensor, one contiguous range of a cell at a time; each element once, and no other."""
    wanted, alone = Box(tuple(offsets), tuple(lengths)), (1,) * len(cells.grid)
    if not wanted.numel:
        return read_stored((*(0 for _ in alone), 0), (*(0 for _ in alone), 0)).reshape(wanted.lengths)
    result: Tensor | None = None
    for cell, inside in cells.meeting(wanted):
        corner = [at * size - first for at, size, first in zip(cell, cells.block, wanted.offsets, strict=True)]
        for row in _rows(cells.block, inside):
            values = read_stored((*cell, stretch_of(cells.block, row) or 0), (*alone, row.numel)).reshape(row.lengths)
            if row.lengths == wanted.lengths:
                return values
            result = torch.empty(wanted.lengths, dtype=values.dtype) if result is None else result
            target = Box(tuple(a + b for a, b in zip(row.offsets, corner, strict=True)), row.lengths)
            result[target.indices] = values
            del values
    assert result is not None
    return result


def _rows(shape: Sequence[int], box: Box) -> Iterator[Box]:
    """Cut a box into boxes that are contiguous in the flattened tensor."""
    # Up to the last axis that is not taken whole, elements are contiguous only along that axis.
    cut = max((axis for axis, length in enumerate(box.lengths) if length != shape[axis]), default=0)
    outer = zip(box.offsets[:cut], box.lengths[:cut], strict=True)
    for index in product(*(range(first, first + length) for first, length in outer)):
        yield Box((*index, *box.offsets[cut:]), (*(1 for _ in index), *box.lengths[cut:]))


@dataclass(frozen=True)
class TorchDistSource:
    """An opened `torch_dist` checkpoint; `cells` tells how tensors were cut that are stored as flattened cells."""

    folder: CheckpointFolder
    content: Source
    cells: Mapping[str, Cells]

    @classmethod
    def open(cls, path: Path) -> TorchDistSource:
        """Open a checkpoint."""
        _require_marker(path)
        folder = CheckpointFolder(path)
        cells = _find_cells(folder)
        entries = [
            Entry(key, cells[key].shape if key in cells else tuple(entry.shape), entry.dtype)
            for key, entry in folder.tensors.items()
        ]
        wanted = needed_objects(folder.objects)
        objects = {key: without_opaque(_only(folder.read_object(key))) for key in wanted}
        if COMMON_KEY not in folder.objects and not (path / COMMON_FILE).is_file():
            raise CheckpointError(f"{path} has neither {COMMON_KEY} nor {COMMON_FILE}; the checkpoint is incomplete")
        common = CommonState.of(without_opaque(read_common(folder)))
        return cls(folder, Source(entries, list(folder.objects), common, objects), cells)

    def read(self, move: Move) -> Tensor:
        """Read the elements of a move, in its shape, contiguous."""
        stored, cells = partial(self.folder.read_box, move.source), self.cells.get(move.source)
        if cells is None:
            return stored(move.offsets, move.lengths).reshape(move.shape)
        return read_true_box(cells, stored, move.offsets, move.lengths).reshape(move.shape)


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
    marker = path / MARKER
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the iter_* folder of a torch_dist checkpoint")
    if not marker.is_file():
        inner = sorted(child.name for child in path.iterdir() if (child / MARKER).is_file())
        hint = f"; did you mean {path / inner[-1]}?" if inner else ""
        raise CheckpointError(
            f"{path} has no {MARKER}, which torch_dist writes last: it is no torch_dist checkpoint, or an "
            f"incomplete one{hint}"
        )
    backend = read_marker(path).get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(f"{marker} says that the format is {backend!r}; only torch_dist can be converted")


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
