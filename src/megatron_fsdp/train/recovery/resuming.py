"""Where a run begins: the checkpoint that is loaded, and what it decides for the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.store import CheckpointStore, RunFolder
from megatron_fsdp.checkpoint.verify import require_sound
from megatron_fsdp.comm.agreement import rank_of, together, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.resolve import with_samples_of_step
from megatron_fsdp.train.recovery.faults import is_out_of_memory

_FACTS = "trainer.facts"
_BATCH = "--global-batch-size"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a run begins.

    Attributes:
        folder: Checkpoint, or folder of checkpoints, to load; None: it begins with fresh weights.
        is_own: Whether this run has saved it itself, before it was started again; then all of it is loaded.
        is_compared: Whether all of it was compared with its checksums just now.
    """

    folder: Path | None = None
    is_own: bool = False
    is_compared: bool = False


def find_origin(job: Job, say: Say) -> Origin:
    """Decide what to load; collective.

    Ranks that were restarted resume from what they have saved, and so does a run with one folder for load and save. A
    damaged checkpoint there is passed over for an earlier one, whose steps are repeated exactly: nobody is there to
    choose. What the user names is loaded or refused.

    Raises:
        CheckpointError: There are checkpoints of this run and none is sound; the same on every rank.
    """
    options = job.options.checkpoint
    if job.load_is_optional and options.save is not None:
        found = newest_sound(options.save, say)
        if found is not None:
            return Origin(found, is_own=job.restarts > 0, is_compared=True)
        if options.load is None or options.load.resolve() == options.save.resolve():
            say(f"{options.save} holds no checkpoint yet: starting from the first step")
            return Origin()
    return Origin(options.load)


def newest_sound(root: Path, say: Say) -> Path | None:
    """Return the newest undamaged checkpoint of a run's folder; None where there is none at all. Collective.

    Raises:
        CheckpointError: None is sound.
    """
    found = _candidates(root, say)
    problems = []
    for path in found:
        try:
            together(f"verifying {path}", lambda path=path: _require_sound(path))  # type: ignore[misc]
        except CheckpointError as error:
            if is_out_of_memory(error):  # which says nothing of the checkpoint
                raise
            problems.append(str(error))
            say(f"WARNING: {path} cannot be used, going back to the one before: {error}")
        else:
            return path
    if found:
        raise CheckpointError(
            f"no checkpoint in {root} can be used, and beginning anew would replace them: move them away to do so, or "
            f"bring back one that is whole ({problems[0]})"
        )
    return None


def _candidates(root: Path, say: Say) -> list[Path]:
    """List whole checkpoints, newest first, from the one that the pointer names on."""
    whole = CheckpointStore(root).iterations()
    pointed = together(f"looking into {root}", lambda: _pointed(root))
    if pointed not in whole and whole:
        named = "has no pointer that names a checkpoint" if pointed is None else f"lacks the checkpoint {pointed}"
        say(f"WARNING: {root} {named}: taking the newest that there is")
    return [RunFolder(root).path_of(number) for number in reversed(whole) if pointed is None or number <= pointed]


def _pointed(root: Path) -> int | None:
    try:
        pointed = RunFolder(root).pointed()
    except CheckpointError:
        return None
    return pointed if isinstance(pointed, int) else None


def _require_sound(path: Path) -> None:
    folder = CheckpointFolder(path)
    if folder.manifest is not None:  # written by another program: only names, shapes and files can be checked
        require_sound(folder, rank_of(None), world_size_of(None))


def saved_batch(path: Path) -> int | None:
    """Return the samples of a step of the run that saved a checkpoint; None if it does not say."""
    folder = CheckpointFolder(path)
    facts = folder.read_object(_FACTS) if _FACTS in folder.objects else []
    found = {str(name): str(value) for name, value in facts} if isinstance(facts, list) else {}
    return int(found[_BATCH]) if _BATCH in found else None


def with_saved_batch(job: Job, origin: Origin, say: Say) -> Job:
    """Return the job with as many samples in a step as the run that it resumes; collective.

    With `--global-batch-size` left out, a step has one microbatch of each rank. On another number of ranks that would
    be another run, so the number that was decided when it began is kept.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigurationError: Its steps have fewer samples than a microbatch of this run; or `--train-samples` would count
            its steps as if they had had another size.
    """
    options, training = job.options, job.options.training
    is_free = training.global_batch_size is not None and training.train_samples is None
    if origin.folder is None or (options.checkpoint.finetune and not origin.is_own) or is_free:
        return job
    path = CheckpointStore(origin.folder).resolve_or_itself()
    total = together(f"reading {path}", lambda: saved_batch(path))
    if total is None or total == job.batch.total:
        return job
    if training.global_batch_size is not None:
        raise ConfigurationError(
            f"{path} was saved by a run with {total} samples in a step, and --global-batch-size is {job.batch.total}: "
            f"all steps of --train-samples have one size; give --global-batch-size {total}, or --train-iters"
        )
    if total < job.batch.micro:
        raise ConfigurationError(
            f"{path} was saved by a run with {total} samples in a step, and --micro-batch-size is {job.batch.micro}: "
            f"give --micro-batch-size {total} or less, or --global-batch-size to change the run"
        )
    say(
        f"--global-batch-size {total}, as in the run that saved {path}; {job.batch.total} would follow from "
        f"{job.batch.ranks} data-parallel ranks, and be another run"
    )
    return with_samples_of_step(job, total)
