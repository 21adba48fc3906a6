"""Convert a `torch_dist` checkpoint to `fsdp_dtensor`: in one process, or on the ranks of a gloo group."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.checkpoint.convert.plan import (
    CommonState,
    Content,
    ConversionPlan,
    ConvertOptions,
    Move,
    make_plan,
    needed_objects,
)
from megatron_fsdp.checkpoint.folder import CheckpointFolder, whole_box
from megatron_fsdp.checkpoint.inspect import read_common, recognise, side_file_problems
from megatron_fsdp.checkpoint.report import decided_by_first, together
from megatron_fsdp.checkpoint.safe_read import Opaque
from megatron_fsdp.checkpoint.save import TensorSource, write_state
from megatron_fsdp.checkpoint.store import (
    POINTER,
    RELEASE,
    iteration_of,
    locate,
    new_shared_folder,
    replace_text,
    require_apart,
)
from megatron_fsdp.checkpoint.verify import require_sound, share_out
from megatron_fsdp.comm.agreement import rank_of, world_size_of
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

Progress = Callable[[int, int], None]
"""(bytes written by this rank, bytes that it will have written)"""


class ConversionMismatchError(CheckpointError):
    """Raised when the output that was read back differs from the source; nothing was published."""


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion, or of its `dry_run`; `ranks` is the number that shared the work."""

    source: Path
    plan: ConversionPlan
    written: bool
    verified: bool
    ranks: int

    def as_json(self) -> Mapping[str, object]:
        """Return the report as plain data for scripts."""
        plan = self.plan
        return {
            "source": str(self.source),
            "written": self.written,
            "verified": self.verified,
            "ranks": self.ranks,
            "tensors": len(plan.moves),
            "bytes": plan.nbytes,
            "values": len(plan.values),
            "moves": [
                {"from": m.source, "offsets": m.offsets, "lengths": m.lengths, "to": m.target, "dtype": str(m.dtype)}
                for m in plan.moves
            ],
            "gating": dict(plan.gating),
            "dropped": [{"key": item.key, "why": item.why} for item in plan.dropped],
            "notes": list(plan.notes),
        }


@dataclass(frozen=True)
class Steps:
    """The steps of a conversion."""

    dry_run: bool = False  # only plan
    verify: bool = False  # read the output back and compare it with the source, before it gets its name
    write_tracker: bool = False  # point `latest_checkpointed_iteration.txt` beside the output to it


def convert(
    source: str | Path,
    target: str | Path,
    options: ConvertOptions | None = None,
    steps: Steps | None = None,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> ConversionReport:
    """Convert a checkpoint; collective. Needs no GPU, and holds one tensor of the output at a time on each rank.

    Args:
        source: The `iter_*` folder of a `torch_dist` checkpoint, or the folder of a run: then its latest.
        target: The folder to make; must not exist, or be empty. It appears when everything is written.
        options: The options of the output.
        steps: Which steps to take.
        progress: Called with the bytes that this rank has written and will write.
        group: The ranks that share the work; None: all, or this process alone.

    Raises:
        CheckpointError: The source cannot be read or converted, or the target not written; the same on every rank,
            and nothing is left of the target.
        ConversionMismatchError: The output differs from the source; nothing is left of it.
    """
    source, target = Path(source), Path(target).absolute()
    options, steps = options or ConvertOptions(), steps or Steps()
    doing = f"converting {source}"
    opened, plan = together(doing, lambda: _prepare(source, target, options, steps, group), group)
    ranks = world_size_of(group)
    if not steps.dry_run:
        with new_shared_folder(target, group) as temporary:
            _write(opened, plan, temporary, progress, group)
            if steps.verify:
                _verify(temporary, group)
        if steps.write_tracker:
            decided_by_first(lambda: replace_text(target.parent / POINTER, _tracked_as(target, opened)), doing, group)
    return ConversionReport(opened.folder.path, plan, not steps.dry_run, steps.verify and not steps.dry_run, ranks)


def _prepare(
    source: Path, target: Path, options: ConvertOptions, steps: Steps, group: dist.ProcessGroup | None
) -> tuple[TorchDistSource, ConversionPlan]:
    opened = TorchDistSource.open(locate(source))
    plan = make_plan(opened.content, options)
    if rank_of(group) == 0 and not steps.dry_run:
        if steps.write_tracker:
            _tracked_as(target, opened)
        require_apart(target, opened.folder.path)
    return opened, plan


def _write(
    opened: TorchDistSource,
    plan: ConversionPlan,
    folder: Path,
    progress: Progress | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Write this rank's share of the moves into the checkpoint of all ranks, and on rank 0 the values; collective."""
    rank, ranks = rank_of(group), world_size_of(group)
    mine = [plan.moves[at] for at in share_out([move.nbytes for move in plan.moves], rank, ranks)]
    total = sum(move.nbytes for move in mine)
    told = None if progress is None else lambda done: progress(min(done, total), total)
    values = plan.values if rank == 0 else ()

    def source_of(move: Move) -> TensorSource:
        return TensorSource(move.shape, move.dtype, [whole_box(move.shape)], lambda _: opened.read(move))

    state: dict[str, Any] = {move.target: source_of(move) for move in mine}
    state |= {value.target: value.value for value in values}
    paths = {written.target: written.path for written in (*mine, *values)}
    write_state(state, folder, group, paths=paths, progress=told)


def _verify(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Compare the output with the checksums that were taken while reading the source; collective."""
    rank, ranks = rank_of(group), world_size_of(group)
    try:
        together(f"verifying {folder}", lambda: require_sound(CheckpointFolder(folder), rank, ranks), group)
    except CheckpointError as error:
        raise ConversionMismatchError(
            f"the output is not what the source holds, so it is not published: {error}"
        ) from error


def _tracked_as(target: Path, opened: TorchDistSource) -> str:
    """Return the tracker file's text for a folder of this name."""
    if target.name == RELEASE:
        return RELEASE
    iteration = opened.content.common.tree.get("iteration")
    if iteration is None or iteration_of(target.name) != iteration:
        name = f"iter_{iteration:07d}" if isinstance(iteration, int) else "release"
        raise CheckpointError(
            f"--write-tracker points Megatron to the folder by the iteration, so {target} has to be named {name}"
        )
    return str(iteration)


# ---- the source ------------------------------------------------------------------------------------------------------


ReadBox = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(offsets, lengths) in the stored tensor -> its elements."""

_TRUE_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class Cells:
    """The division of a tensor of the true shape into cells: their number and length along each axis."""

    grid: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the true tensor."""
        return tuple(count * length for count, length in zip(self.grid, self.block, strict=True))

    @classmethod
    def of(cls, key: str, stored: Sequence[int], true_shape: Sequence[int]) -> Cells:
        """Derive the cells from the stored and the true shape."""
        grid = tuple(stored[:-1])
        if len(grid) == len(true_shape) and 0 not in grid:
            cells = cls(grid, tuple(size // count for size, count in zip(true_shape, grid, strict=True)))
            if cells.shape == tuple(true_shape) and tuple(stored[-1:]) == (math.prod(cells.block),):
                return cells
        raise CheckpointError(
            f"{key} is stored as flattened cells of shape {tuple(stored)}, which does not fit its true shape "
            f"{tuple(true_shape)}; the metadata is damaged"
        )

    def read(self, read_stored: ReadBox, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read a box of the true tensor from the overlapping cells."""
        starts, block, ndim = np.array(offsets, np.int64), np.array(self.block, np.int64), len(offsets)
        first = starts // block
        counts = -(-(starts + lengths) // block) - first
        stored = read_stored((*first.tolist(), 0), (*counts.tolist(), math.prod(self.block)))
        by_axis = [axis for pair in zip(range(ndim), range(ndim, 2 * ndim), strict=True) for axis in pair]
        ordered = stored.reshape(*counts.tolist(), *self.block).permute(by_axis)
        inside = Box(tuple((starts - first * block).tolist()), tuple(lengths))
        return ordered.reshape((counts * block).tolist())[inside.indices]


@dataclass(frozen=True)
class TorchDistSource:
    """An opened `torch_dist` checkpoint; `cells` has the division of tensors that are stored as flattened cells."""

    folder: CheckpointFolder
    content: Content
    cells: Mapping[str, Cells]

    @classmethod
    def open(cls, path: Path) -> TorchDistSource:
        """Open a checkpoint."""
        folder = CheckpointFolder(path)
        kind = recognise(folder)
        if kind.format != "torch_dist":
            raise CheckpointError(f"{path} is a checkpoint of {kind.title}; only torch_dist can be converted")
        for problem in side_file_problems(folder):
            raise CheckpointError(f"{path}: {problem.name} is {problem.state}: {problem.reason}")
        entries, cells = dict(folder.tensors), {}
        told: Any = getattr(folder.metadata, "mcore_data", None)
        for key, entry in folder.tensors.items() if isinstance(told, Mapping) else ():
            about = told.get(key)
            true_shape = about.get(_TRUE_SHAPE) if isinstance(about, Mapping) else None
            if true_shape is not None:
                cells[key] = Cells.of(key, entry.shape, tuple(map(int, true_shape)))
                entries[key] = replace(entry, shape=cells[key].shape)
        objects = {}
        for key in needed_objects(folder.objects):
            found = without_opaque(folder.read_object(key))
            objects[key] = found[0] if isinstance(found, list) and len(found) == 1 else found  # as Megatron stores it
        common = CommonState.of(without_opaque(read_common(folder)))
        return cls(folder, Content(list(entries.values()), list(folder.objects), common, objects), cells)

    def read(self, move: Move) -> Tensor:
        """Read the elements of a move, in its shape, contiguous."""
        stored, cells = partial(self.folder.read_box, move.source), self.cells.get(move.source)
        if cells is None:
            return stored(move.offsets, move.lengths).reshape(move.shape)
        return cells.read(stored, move.offsets, move.lengths).reshape(move.shape)


def without_opaque(value: Any) -> Any:
    """Return a copy with text instead of objects of unknown classes, which anyone can read."""
    if isinstance(value, Opaque):
        return f"{value.qualified_name}({', '.join(map(str, value.arguments))})"
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**{name: without_opaque(inner) for name, inner in vars(value).items()})
    if isinstance(value, Mapping):
        return {without_opaque(key): without_opaque(inner) for key, inner in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(without_opaque(inner) for inner in value)
    return value
