"""Converts a `torch_dist` checkpoint to `fsdp_dtensor`: in one process, or on the ranks of a gloo group."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_fsdp.checkpoint.checksum import checksum_box
from megatron_fsdp.checkpoint.convert.entries import Move, Value
from megatron_fsdp.checkpoint.convert.plan import ConversionPlan, ConvertOptions, make_plan
from megatron_fsdp.checkpoint.convert.source import TorchDistSource
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.new_folder import new_shared_folder, require_apart
from megatron_fsdp.checkpoint.save import Seal, SealingWriter, write_planned
from megatron_fsdp.checkpoint.store import POINTER, RELEASE, iteration_of
from megatron_fsdp.checkpoint.tools.locate import locate
from megatron_fsdp.checkpoint.verify import require_sound, share_out
from megatron_fsdp.comm.agreement import decided_by_first, rank_of, together, world_size_of
from megatron_fsdp.errors import CheckpointError

ReadMove = Callable[[Move], Tensor]
"""Reads the box of a move, in the move's shape, contiguous."""

Progress = Callable[[int, int], None]
"""(bytes written by this rank, bytes that it will have written)"""


class _MovePlanner(DefaultSavePlanner):
    """A DCP planner that offers moves as tensors and reads each when it is written."""

    def __init__(self, moves: Sequence[Move], values: Sequence[Value], read: ReadMove) -> None:
        super().__init__()
        self.seal = Seal()
        self._saved: dict[int, tuple[bytes, str]] = {}
        self._moves = {move.target: move for move in moves}
        self._values = {value.target: value for value in values}
        self._read = read

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002  # torch's signature
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self.mappings = {target: thing.path for target, thing in (self._moves | self._values).items()}

    def create_local_plan(self) -> SavePlan:
        items = [_tensor_item(m.target, m.shape, TensorProperties(dtype=m.dtype)) for m in self._moves.values()]
        for target, value in self._values.items():
            if isinstance(value.value, Tensor):
                made = TensorProperties.create_from_tensor(value.value)
                items.append(_tensor_item(target, tuple(value.value.shape), made))
            else:
                items.append(WriteItem(MetadataIndex(target), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        target = write_item.index.fqn
        data = self._read(self._moves[target]) if target in self._moves else self._values[target].value
        if isinstance(data, Tensor):
            self.seal.tensors[target] = checksum_box(data, (0,) * data.ndim, data.shape)
            return data
        raw, self.seal.objects[target] = self._serialised(data)
        return io.BytesIO(raw)

    def _serialised(self, value: object) -> tuple[bytes, str]:
        """Return bytes and their hash; values that parameters of a group share are serialised once."""
        if id(value) not in self._saved:  # ids stay valid: the plan holds the values
            stream = io.BytesIO()
            torch.save(value, stream)
            raw = stream.getvalue()
            self._saved[id(value)] = raw, hashlib.sha256(raw).hexdigest()
        return self._saved[id(value)]


def _tensor_item(target: str, shape: tuple[int, ...], properties: TensorProperties) -> WriteItem:
    size, origin = torch.Size(shape), torch.Size([0] * len(shape))
    data = TensorWriteData(ChunkStorageMetadata(origin, size), properties, size)
    return WriteItem(MetadataIndex(target, origin), WriteItemType.TENSOR, tensor_data=data)


class ConversionMismatchError(CheckpointError):
    """The output that was read back differs from the source; nothing was published."""


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion, or with `dry_run` what it would do.

    Attributes:
        source: The folder that was read.
        plan: All moves and values.
        written: Whether the output exists now.
        verified: Whether it was read back and compared.
        ranks: How many shared the work.
    """

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
    """The steps of a conversion.

    Attributes:
        dry_run: Only plan.
        verify: Read the output back and compare it with the source, before it gets its name.
        write_tracker: Point `latest_checkpointed_iteration.txt` beside the output to it.
    """

    dry_run: bool = False
    verify: bool = False
    write_tracker: bool = False


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
        options: What to write, and how.
        steps: Which steps to take.
        progress: Told the bytes that this rank has written.
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
        with new_shared_folder(target, {}, group) as temporary:
            _write(opened, plan, temporary, progress, group)
            if steps.verify:
                _verify(temporary, group)
        if steps.write_tracker:
            decided_by_first(lambda: _track(target, _tracked_as(target, opened)), doing, group)
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
    rank = rank_of(group)
    mine = [plan.moves[at] for at in share_out([move.nbytes for move in plan.moves], rank, world_size_of(group))]
    total = sum(move.nbytes for move in mine)
    told = None if progress is None else lambda done: progress(min(done, total), total)
    planner = _MovePlanner(mine, plan.values if rank == 0 else (), opened.read)
    write_planned({}, SealingWriter(folder, told), planner, group)


def _verify(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Compare what was written with the checksums that were taken of the source as it was read; collective."""
    try:
        together(
            f"verifying {folder}",
            lambda: require_sound(CheckpointFolder(folder), rank_of(group), world_size_of(group)),
            group,
        )
    except CheckpointError as error:
        raise ConversionMismatchError(
            f"the output is not what the source holds, so it is not published: {error}"
        ) from error


def _track(target: Path, text: str) -> None:
    tracker = target.parent / POINTER
    fresh = tracker.with_name(f"{POINTER}.tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(tracker)


def _tracked_as(target: Path, opened: TorchDistSource) -> str:
    """Return what the tracker file says for a folder of this name."""
    if target.name == RELEASE:
        return RELEASE
    iteration = opened.content.common.tree.get("iteration")
    if iteration is None or iteration_of(target.name) != iteration:
        name = f"iter_{iteration:07d}" if isinstance(iteration, int) else "release"
        raise CheckpointError(
            f"--write-tracker points Megatron to the folder by the iteration, so {target} has to be named {name}"
        )
    return str(iteration)
