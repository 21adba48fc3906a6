"""Converts a `torch_dist` checkpoint to `fsdp_dtensor`: in one process, or on the ranks of a gloo group."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fsdp.checkpoint.convert.plan import ConversionPlan, ConvertOptions, Value, make_plan
from megatron_fsdp.checkpoint.convert.source import TorchDistSource
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.new_folder import new_shared_folder, replace_text, require_apart
from megatron_fsdp.checkpoint.save import ObjectSource, Source, TensorSource, write_sources
from megatron_fsdp.checkpoint.store import POINTER, RELEASE, iteration_of, locate
from megatron_fsdp.checkpoint.verify import require_sound, share_out
from megatron_fsdp.comm.agreement import decided_by_first, rank_of, together, world_size_of
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

Progress = Callable[[int, int], None]
"""(bytes written by this rank, bytes that it will have written)"""


class ConversionMismatchError(CheckpointError):
    """The output that was read back differs from the source; nothing was published."""


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion, or with `dry_run` what it would do; `ranks` is how many shared the work."""

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
    rank = rank_of(group)
    mine = [plan.moves[at] for at in share_out([move.nbytes for move in plan.moves], rank, world_size_of(group))]
    total = sum(move.nbytes for move in mine)
    told = None if progress is None else lambda done: progress(min(done, total), total)
    values = plan.values if rank == 0 else ()
    sources = [_whole(move.target, move.shape, move.dtype, partial(opened.read, move)) for move in mine]
    paths = {move.target: move.path for move in mine} | {value.target: value.path for value in values}
    write_sources(folder, [*sources, *_small(values)], paths, group, told)


def _whole(key: str, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> TensorSource:
    return TensorSource(key, shape, dtype, [Box((0,) * len(shape), shape)], lambda _: read())


def _small(values: Iterable[Value]) -> Iterator[Source]:
    """Yield the values as they are written; those that parameters of a group share are serialised once."""
    saved: dict[int, bytes] = {}  # ids stay valid: the plan holds the values

    def serialised(value: object) -> bytes:
        if id(value) not in saved:
            stream = io.BytesIO()
            torch.save(value, stream)
            saved[id(value)] = stream.getvalue()
        return saved[id(value)]

    for each in values:
        if isinstance(each.value, torch.Tensor):
            yield _whole(each.target, tuple(each.value.shape), each.value.dtype, each.value.detach)
        else:
            yield ObjectSource(each.target, partial(serialised, each.value))


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
