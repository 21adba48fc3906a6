"""Convert a `torch_dist` checkpoint to `fsdp_dtensor`: on one process, or on the ranks of a gloo group."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_fsdp.checkpoint.convert.execute import Progress, share_out, write_moves
from megatron_fsdp.checkpoint.convert.options import ConvertOptions
from megatron_fsdp.checkpoint.convert.plan import ConversionPlan, make_plan
from megatron_fsdp.checkpoint.convert.source import TorchDistSource
from megatron_fsdp.checkpoint.convert.verify import differing_keys, differing_moves, differing_values
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.new_folder import require_apart
from megatron_fsdp.checkpoint.ranks import gather_objects, rank_of, together, world_size_of
from megatron_fsdp.checkpoint.tools.locate import locate
from megatron_fsdp.errors import CheckpointError

_TRACKER = "latest_checkpointed_iteration.txt"


class ConversionMismatchError(CheckpointError):
    """The output that was read back is not what the source holds; nothing was published."""


@dataclass(frozen=True)
class ConversionReport:
    """What was done, or with `dry_run` would be.

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
        """For scripts."""
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
    """Which steps to take.

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
    """Convert a checkpoint. Collective; needs no GPU, and holds one tensor of the output at a time on each rank.

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
        found = differing_moves(output, mine, opened.read) + differing_values(output, values)
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
    """What the tracker file says for a folder of this name."""
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
