"""Converts a `torch_dist` checkpoint to `fsdp_dtensor`: in one process, or on the ranks of a gloo group."""

from __future__ import annotations

import hashlib
import heapq
import io
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from megatron_fsdp.checkpoint.convert.entries import Move, Value, listed
from megatron_fsdp.checkpoint.convert.plan import ConversionPlan, ConvertOptions, make_plan
from megatron_fsdp.checkpoint.convert.source import TorchDistSource
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.new_folder import require_apart
from megatron_fsdp.checkpoint.save import Seal, SealingWriter, write_planned
from megatron_fsdp.checkpoint.tools.locate import locate
from megatron_fsdp.comm.agreement import gather_objects, rank_of, together, world_size_of
from megatron_fsdp.errors import CheckpointError

ReadMove = Callable[[Move], Tensor]
"""Reads the box of a move, in the move's shape, contiguous."""

Progress = Callable[[int, int], None]
"""(bytes written by this rank, bytes that it will have written)"""

_TRACKER = "latest_checkpointed_iteration.txt"


def share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign items to ranks so that their bytes balance: the largest first, each to the rank with the fewest.

    Returns:
        For each rank the indices of its items, in order.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + sizes[index], rank))
    return [sorted(share) for share in shares]


def write_moves(
    folder: Path,
    moves: Sequence[Move],
    values: Sequence[Value],
    read: ReadMove,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's moves and values into the DCP checkpoint of all ranks; collective.

    Args:
        folder: To write to; the same on every rank.
        moves: This rank's; no other rank has them.
        values: This rank's; no other rank has them.
        read: Reads a move.
        progress: Called after each move.
        group: The ranks.

    Raises:
        CheckpointError: Reading or writing failed on some rank; the same on every rank.
    """
    total = sum(move.nbytes for move in moves)
    told = None if progress is None else lambda done: progress(min(done, total), total)
    write_planned({}, SealingWriter(folder, told), _MovePlanner(moves, values, read), group)


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
            raw = saved_bytes(value)
            self._saved[id(value)] = raw, hashlib.sha256(raw).hexdigest()
        return self._saved[id(value)]


def saved_bytes(value: object) -> bytes:
    """Serialise an object with `torch.save`."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _tensor_item(target: str, shape: tuple[int, ...], properties: TensorProperties) -> WriteItem:
    size, origin = torch.Size(shape), torch.Size([0] * len(shape))
    data = TensorWriteData(ChunkStorageMetadata(origin, size), properties, size)
    return WriteItem(MetadataIndex(target, origin), WriteItemType.TENSOR, tensor_data=data)


def differing_keys(output: CheckpointFolder, targets: Sequence[str]) -> list[str]:
    """List keys that are missing from or unexpected in the output, one line each."""
    there, wanted = {*output.tensors, *output.objects}, set(targets)
    lines = [f"missing: {listed(sorted(wanted - there))}"] if wanted - there else []
    return lines + ([f"unexpected: {listed(sorted(there - wanted))}"] if there - wanted else [])


def differing_values(
    output: CheckpointFolder, moves: Sequence[Move], values: Sequence[Value], read: ReadMove
) -> list[str]:
    """List tensors and objects of the output that differ from the source, one line each."""
    found = []
    for move in moves:
        entry = output.tensors.get(move.target)
        if entry is None or entry.dtype != move.dtype or not _holds(output, move.target, read(move)):
            found.append(f"{move.target} (from {move.source})")
    for value in values:
        if isinstance(value.value, Tensor):
            is_same = _holds(output, value.target, value.value)
        else:
            is_same = value.target in output.objects and output.read_bytes(value.target) == saved_bytes(value.value)
        found += [] if is_same else [value.target]
    return found


def _holds(output: CheckpointFolder, key: str, wanted: Tensor) -> bool:
    """Return whether a tensor of the output is bitwise equal to the wanted one."""
    entry = output.tensors.get(key)
    if entry is None or (entry.shape, entry.dtype) != (tuple(wanted.shape), wanted.dtype):
        return False
    found = output.read_tensor(key)
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (found, wanted)))


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
    if steps.dry_run:
        return ConversionReport(opened.folder.path, plan, written=False, verified=False, ranks=ranks)
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        _write_all(opened, plan, temporary, steps, progress, group)
        together(doing, lambda: _publish(temporary, target, opened, steps) if rank_of(group) == 0 else None, group)
    except BaseException:
        # Every rank has left the folder: errors above are raised on all of them together.
        if rank_of(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return ConversionReport(opened.folder.path, plan, written=True, verified=steps.verify, ranks=ranks)


def _prepare(
    source: Path, target: Path, options: ConvertOptions, steps: Steps, group: dist.ProcessGroup | None
) -> tuple[TorchDistSource, ConversionPlan]:
    opened = TorchDistSource.open(locate(source))
    plan = make_plan(opened.content, options)
    if rank_of(group) == 0 and not steps.dry_run:
        if steps.write_tracker:
            _tracked_as(target, opened)
        require_apart(target, opened.folder.path)
        _require_free(target)
    return opened, plan


def _require_free(target: Path) -> None:
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise CheckpointError(f"{target} exists and is not an empty folder; give another one, or empty it")
    temporary = target.with_name(f"{target.name}.tmp")
    if temporary.exists():
        raise CheckpointError(
            f"{temporary} is left from a conversion that was interrupted, or is still running; remove it"
        )


def _write_all(
    opened: TorchDistSource,
    plan: ConversionPlan,
    temporary: Path,
    steps: Steps,
    progress: Progress | None,
    group: dist.ProcessGroup | None,
) -> None:
    rank = rank_of(group)
    shares = share_out([move.nbytes for move in plan.moves], world_size_of(group))
    mine = [plan.moves[index] for index in shares[rank]]
    values = plan.values if rank == 0 else ()
    write_moves(temporary, mine, values, opened.read, progress, group)
    if not steps.verify:
        return

    def compare() -> list[str]:
        output = CheckpointFolder(temporary)
        found = differing_values(output, mine, values, opened.read)
        targets = [*(move.target for move in plan.moves), *(value.target for value in plan.values)]
        return found + (differing_keys(output, targets) if rank == 0 else [])

    found = together(f"verifying {temporary}", compare, group)
    differing = sorted(line for lines in gather_objects(found, group) for line in lines)
    if differing:
        raise ConversionMismatchError(
            f"{len(differing)} tensors or keys of the output are not what the source holds, so it is not published: "
            f"{'; '.join(differing[:8])}"
        )


def _publish(temporary: Path, target: Path, opened: TorchDistSource, steps: Steps) -> None:
    with suppress(FileNotFoundError):
        target.rmdir()
    temporary.rename(target)
    if steps.write_tracker:
        tracker = target.parent / _TRACKER
        fresh = tracker.with_name(f"{_TRACKER}.tmp")
        fresh.write_text(_tracked_as(target, opened), encoding="utf-8")
        fresh.replace(tracker)


def _tracked_as(target: Path, opened: TorchDistSource) -> str:
    """Return what the tracker file says for a folder of this name."""
    if target.name == "release":
        return "release"
    iteration = opened.content.common.tree.get("iteration")
    found = re.fullmatch(r"iter_(\d{7,})", target.name)
    if found is None or int(found[1]) != iteration:
        name = f"iter_{iteration:07d}" if isinstance(iteration, int) else "release"
        raise CheckpointError(
            f"--write-tracker points Megatron to the folder by the iteration, so {target} has to be named {name}"
        )
    return str(iteration)
