"""Run recorded steps of a deterministic run again, on one rank, and compare every recorded bit."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.checkpoint.store import RunFolder
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.checkpoints import Origin, RunCheckpoints, changes_of, facts_of
from megatron_fsdp.train.console import Say
from megatron_fsdp.train.data.preparation import prepare_data, tokens_folder
from megatron_fsdp.train.data.tokens import TokenData, make_feed
from megatron_fsdp.train.loop import NanGuard, Run, train_step
from megatron_fsdp.train.measure import Progress, Speed, StepRecord
from megatron_fsdp.train.models.trained import build
from megatron_fsdp.train.options import CheckpointOptions, RecoveryOptions, ReportingOptions
from megatron_fsdp.train.options.command_line import Layer, assemble, make_parser
from megatron_fsdp.train.options.job import Job, World, resolve
from megatron_fsdp.train.program import find_device_type
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.train.recorder import APPLIED_FILE, METRICS_FILE, read_lines
from megatron_fsdp.train.run_job import seed_everything

_MEASURED = ("log_num_zeros_in_grad", "log_digests_interval")
_OF_THE_RUN = {
    *(field.name for cls in (CheckpointOptions, RecoveryOptions, ReportingOptions) for field in fields(cls)),
    *("nproc", "distributed_backend", "num_workers", "data_cache_path"),
    *("eval_interval", "exit_interval", "exit_duration_in_mins", "skip_train"),
    *("num_distributed_optimizer_instances", "outer_dp_sharding_strategy"),
}.difference(_MEASURED)
"""Options of the ranks, files and times of a run, which do not change a step's numbers."""

# Not the norm of the weights, for display, which is merged rank by rank.
_COMPARED = ("loss", "gradients", "grad_norm", "learning_rate", "loss_scale", "skipped", "num_zeros_in_grad", "weights")


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    first: int  # the first step that was executed
    last: int  # the last one: as asked for, or where something differed
    digests: int  # of how many of them the run recorded digests
    difference: str | None = None  # the first one, as a sentence; None: all is the same, bit for bit

    def summary(self) -> str:
        """Describe the result in two lines."""
        steps = f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"
        recorded = f"digests were recorded of {self.digests}"
        if not self.digests:
            recorded = "no digests were recorded (--log-digests-interval)"
        return f"executed {steps} again on one rank; {recorded}\n{self.difference or 'the same bits'}"


def replay(
    folder: Path,
    step: int | None = None,
    *,
    checkpoints: Path | None = None,
    data_path: Path | None = None,
    from_start: bool = False,
    say: Say = lambda _: None,
) -> Replayed:
    """Run the steps from the last checkpoint before `step` to `step` again in this process, and compare.

    Args:
        folder: The results of a run of `mfsdp train --deterministic world`, on any number of ranks.
        step: The step, from 1; None: the last one that is recorded.
        checkpoints: Where its checkpoints are now; None: where it saved them.
        data_path: Where its text is now; None: where it was.
        from_start: Begin with fresh weights instead of a checkpoint, for a run that did.
        say: Prints a line.

    Raises:
        ConfigurationError: The folder holds no such run or step, the run is not deterministic, or there is nothing to
            begin with; or data or options are not those of the run.
    """
    if from_start and checkpoints is not None:
        raise ConfigurationError("--checkpoints has no effect with --from-start; give one of them")
    applied, records = _read(folder, step)
    step = max(records) if step is None else step
    begin = None if from_start else _checkpoint_before(step, checkpoints or applied["options"].get("save"), folder)
    with _reopened(folder, applied, load=begin, data_path=data_path) as (job, data, rank):
        trained = build(job, data.vocab_size, rank)
        keeper = RunCheckpoints(job, trained, data, Origin(begin), say)
        done = keeper.start()
        if changes := keeper.changes() or changes_of(applied.get("facts", {}), facts_of(job, data)):
            raise ConfigurationError(
                f"{folder} cannot be replayed from {begin or 'its start'}: its run had other data or options: "
                f"{'; '.join(changes)}; "
                "bring the files back, or name their place with --data-path or --checkpoints"
            )
        with closing(make_feed(data, job, 0, pins=rank.device.type != "cpu")) as feed:
            return _compare_steps(Run(job, trained, data, feed, rank, Speed(job.tokens_per_step)), done, step, records)


@contextmanager
def _reopened(folder: Path, applied: Mapping[str, Any], **given: Path | None) -> Iterator[tuple[Job, TokenData, Rank]]:
    """Resolve the options of a run, and open its data, with this process as the only rank.

    An existing process group is kept.
    """
    job = _job(applied, {name: str(value) for name, value in given.items() if value is not None}, folder)
    device = torch.device(find_device_type(job.options.parallel.device))
    seed_everything(job.options.training.seed)
    is_ours = not dist.is_initialized()
    if is_ours:
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        rank, has_tokens = Rank(0, 1, device, os.getppid()), tokens_folder(job.options, folder.absolute())[0].is_dir()
        with tempfile.TemporaryDirectory() as scratch:
            yield job, prepare_data(job, folder.absolute() if has_tokens else Path(scratch), rank), rank
    finally:
        if is_ours:
            dist.destroy_process_group()


def _compare_steps(run: Run, done: Progress, last: int, records: Mapping[int, StepRecord]) -> Replayed:
    first, digests = done.steps + 1, 0
    guard = NanGuard(run.job.train_iters, lambda _: None)
    while done.steps < last:
        found, _, _ = train_step(run, done, guard, (False, False))
        done = Progress(found.step, found.samples, found.skipped)
        recorded = records.get(found.step)
        if recorded is not None:
            digests += bool(recorded.digests)
            if (difference := first_difference(recorded, found)) is not None:
                return Replayed(first, found.step, digests, f"step {found.step}: {difference}")
    return Replayed(first, last, digests)


def first_difference(recorded: StepRecord, found: StepRecord) -> str | None:
    """Return the first difference of a step, in the order in which a step computes; None without any."""
    if recorded.data_checksum != found.data_checksum:
        return f"data: recorded checksum {recorded.data_checksum}, replayed {found.data_checksum}"
    compared = (
        _different_units(what, recorded.digests.get(what, {}), found.digests.get(what, {}))
        if what in ("gradients", "weights")
        else _different_numbers(what, recorded, found)
        for what in _COMPARED
    )
    return next(filter(None, compared), None)


def _different_numbers(what: str, recorded: StepRecord, found: StepRecord) -> str | None:
    try:
        left, right = float(getattr(recorded, what)), float(getattr(found, what))
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"the record of step {recorded.step} is damaged: {what} is {getattr(recorded, what)!r}, no number"
        ) from None
    is_same = left == right or (math.isnan(left) and math.isnan(right))
    return None if is_same else f"{what}: recorded {left!r} ({left.hex()}), replayed {right!r} ({right.hex()})"


def _different_units(what: str, left: Mapping[str, str], right: Mapping[str, str]) -> str | None:
    if left and right and left.keys() != right.keys():
        # Other units or buckets: digests of the same tensors add up to the same.
        sums = (sum(int(digest, 16) for digest in each.values()) & (1 << 64) - 1 for each in (left, right))
        left, right = ({"all units together": f"{total:016x}"} for total in sums)
    different = [unit for unit in left if right and left[unit] != right[unit]]
    if not different:
        return None
    unit, others = different[0], "" if len(different) == 1 else f" (also {', '.join(different[1:])})"
    return f"{what} of unit {unit}: recorded digest {left[unit]}, replayed {right[unit]}{others}"


# ---- the run ---------------------------------------------------------------------------------------------------------


def _read(folder: Path, step: int | None) -> tuple[dict[str, Any], dict[int, StepRecord]]:
    """Read the settings of a run and its steps."""
    try:
        applied: dict[str, Any] = json.loads((folder / APPLIED_FILE).read_text(encoding="utf-8"))
        deterministic, total = applied["options"].get("deterministic"), applied["batch"]["total"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{folder} holds no results of a run ({APPLIED_FILE}): give the folder of --out of mfsdp train"
        ) from None
    if deterministic != "world":
        raise ConfigurationError(
            f"{folder} was trained without --deterministic world, so one rank has other bits than the "
            f"{applied['batch'].get('ranks', 'several')} ranks of the run: train with it, then every step can be "
            "replayed"
        )
    assert isinstance(total, int)
    records = {record.step: record for record in read_lines(folder / METRICS_FILE, StepRecord)}
    if not records:
        raise ConfigurationError(
            f"{folder / METRICS_FILE} has no steps: the run ended before the first one, or the file is gone"
        )
    if step is not None and step not in records:
        first, last = min(records), max(records)
        held = f"it has steps {first} to {last}; give one of them"
        if first < step < last:
            held = f"its line, between those of steps {first} and {last}, is missing or damaged; give another step"
        raise ConfigurationError(f"{folder / METRICS_FILE} has no step {step}: {held}")
    return applied, records


def _checkpoint_before(step: int, saves: Path | str | None, folder: Path) -> Path:
    if saves is None:
        raise ConfigurationError(
            f"the run of {folder} saved no checkpoints (--save): name their place with --checkpoints, or give "
            f"--from-start to execute all {step} steps again from fresh weights"
        )
    try:
        found = RunFolder(Path(saves)).iterations()
    except (OSError, CheckpointError):
        found = []
    before = [iteration for iteration in found if iteration < step]
    if not before:
        held = f"its checkpoints are of steps {', '.join(map(str, found))}" if found else "it holds none"
        raise ConfigurationError(
            f"{saves} has no checkpoint before step {step} ({held}): give a later step, name another place with "
            f"--checkpoints, or give --from-start to execute all {step} steps again from fresh weights"
        )
    return RunFolder(Path(saves)).path_of(before[-1])


def _job(applied: Mapping[str, Any], given: Mapping[str, str], folder: Path) -> Job:
    """Resolve the recorded options for one rank."""
    parser, options = make_parser(), applied["options"]
    try:
        said = {name: options[name] for name in applied["origins"] if name not in _OF_THE_RUN}
        said |= {**given, "global_batch_size": applied["batch"]["total"]}
        words = [word for name, value in said.items() for word in parser.words_of(name, value)]
    except KeyError as error:
        raise ConfigurationError(
            f"{folder / APPLIED_FILE} names the option {error}, which version {__version__} does not know; replay with "
            f"the version of the run, {applied.get('version', 'unknown')}"
        ) from None
    values = parser.read(words)
    chosen = assemble([Layer(f"config {folder / APPLIED_FILE}", values)], parser.problems)
    return resolve(chosen, World(1, find_device_type(chosen.parallel.device)))
