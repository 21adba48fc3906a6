"""Checkpoints of a run: its origin, the facts that decide its numbers, saves on the way and when interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp.checkpoint import Checkpointer, LoadReport, load_checkpoint
from megatron_fsdp.checkpoint.convert.groups import dump_param_to_param_group_map
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.report import decided_by_first, together
from megatron_fsdp.checkpoint.store import CheckpointStore, RunFolder
from megatron_fsdp.checkpoint.verify import require_sound
from megatron_fsdp.comm.agreement import rank_of, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train.console import Say
from megatron_fsdp.train.data.tokens import TokenData
from megatron_fsdp.train.failures import NotSavedError, is_out_of_memory
from megatron_fsdp.train.measure import Progress
from megatron_fsdp.train.models.build import config_values
from megatron_fsdp.train.models.export import saved_facts
from megatron_fsdp.train.models.megatron_checkpoint import view_for
from megatron_fsdp.train.models.trained import Trained
from megatron_fsdp.train.options import flag_for
from megatron_fsdp.train.options.job import Job, World, resolve
from megatron_fsdp.train.ranks import Rank

_BATCH = "--global-batch-size"
_OWED = "an evaluation after this step"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_STRICT = (
    "pass strict=False to load what fits",
    "give --no-strict-fsdp-dtensor-load to load what fits, or --no-load-optim where only the optimizer does not",
)
"""Maps advice in library errors to trainer flags."""

# ---- where a run begins ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """The checkpoint, or folder of checkpoints, from which a run begins; None: it begins with fresh weights."""

    folder: Path | None = None
    is_own: bool = False  # saved by this run itself, before it was started again; then all of it is loaded
    is_compared: bool = False  # with its checksums, just now


def find_origin(job: Job, say: Say) -> Origin:
    """Choose the checkpoint to load; collective.

    Ranks that were restarted resume from their own saves, and so does a run with one folder for load and save. A
    damaged checkpoint there is skipped for an earlier one, whose steps are repeated exactly: a restart has no user to
    ask. The user's choice is loaded or is an error.
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
    """Return the newest undamaged checkpoint of a run's folder; None without any. Collective.

    The pointer names the newest one; if it is damaged too, the newest existing one counts.
    """
    whole = CheckpointStore(root).iterations()
    pointed = together(f"looking into {root}", lambda: _pointed(root))
    if pointed not in whole and whole:
        named = "has no pointer that names a checkpoint" if pointed is None else f"lacks the checkpoint {pointed}"
        say(f"WARNING: {root} {named}: taking the newest that there is")
    problems = []
    for number in reversed(whole):
        path = RunFolder(root).path_of(number)
        if pointed is not None and number > pointed:  # of a run that was abandoned for an earlier step
            continue
        try:
            together(f"verifying {path}", partial(_require_sound, path))
        except CheckpointError as error:
            if is_out_of_memory(error):  # which says nothing of the checkpoint
                raise
            problems.append(str(error))
            say(f"WARNING: {path} cannot be used, going back to the one before: {error}")
        else:
            return path
    if problems:
        raise CheckpointError(
            f"no checkpoint in {root} can be used, and beginning anew would replace them: move them away to do so, or "
            f"bring back one that is whole ({problems[0]})"
        )
    return None


def _pointed(root: Path) -> int | None:
    with suppress(CheckpointError):
        pointed = RunFolder(root).pointed()
        return pointed if isinstance(pointed, int) else None
    return None


def _require_sound(path: Path) -> None:
    folder = CheckpointFolder(path)
    if folder.manifest is not None:  # written by another program: only names, shapes and files can be checked
        require_sound(folder, rank_of(None), world_size_of(None))


def with_saved_batch(job: Job, origin: Origin, rank: Rank, say: Say) -> Job:
    """Return the job with the samples per step of the run that it resumes; collective.

    With `--global-batch-size` left out, a step has one microbatch of each rank. On another number of ranks that would
    be another run, so the number of the first start is kept.
    """
    options, training = job.options, job.options.training
    if origin.folder is None or training.global_batch_size or (options.checkpoint.finetune and not origin.is_own):
        return job
    folder = CheckpointFolder(CheckpointStore(origin.folder).resolve())

    def saved() -> int | None:
        found = saved_facts(folder)
        return int(found[_BATCH]) if _BATCH in found else None

    total = together(f"reading {folder.path}", saved)
    if total is None or total == job.batch.total:
        return job
    say(f"{_BATCH} {total}, as in the run that saved {folder.path}; {job.batch.total} would follow from the ranks")
    options = replace(options, training=replace(training, global_batch_size=total))
    return resolve(options, World(rank.count, rank.device.type, job.restarts))


# ---- the facts that decide its numbers -------------------------------------------------------------------------------


@dataclass
class TrainingState:
    """The loop's own state, saved as `trainer`: its progress, and the facts that decide the numbers, by option."""

    facts: dict[str, str]
    progress: Progress = field(default_factory=Progress)
    saved_facts: dict[str, str] = field(default_factory=dict)  # of the run that saved
    owes_evaluation: bool = False  # after the last step, since the run was asked to end

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        owed = {_OWED: "due"} if self.owes_evaluation else {}
        facts = [list(item) for item in (self.facts | owed).items()]  # one object, whatever options later versions have
        return {**asdict(self.progress), "facts": facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.progress = Progress(
            int(state["steps"]), int(state["samples"]), int(state["skipped"]), float(state["elapsed_s"])
        )
        self.saved_facts = {str(name): str(value) for name, value in state["facts"]}
        self.owes_evaluation = self.saved_facts.pop(_OWED, None) is not None


def changes_of(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe the differences between facts (`facts_of`), as far as both are known."""
    return [
        f"{name} was {saved[name]} and is {value}" for name, value in now.items() if saved.get(name, value) != value
    ]


def facts_of(job: Job, data: TokenData) -> dict[str, str]:
    """Return the facts that decide the losses of a run, by option; the number of ranks changes only rounding."""
    options, schedule = job.options, job.schedule
    names = ["optimizer", *(("sgd_momentum",) if options.optimizer.optimizer == "sgd" else _OF_ADAM)]
    names += ["weight_decay", "clip_grad", "calculate_per_token_loss", "seed", "eod_mask_loss", "split"]
    rates = {
        "--lr": schedule.peak,
        "--min-lr": schedule.final,
        "--lr-decay-style": schedule.style,
        "--lr-decay-iters": schedule.decay_steps,
        "--lr-warmup-iters": schedule.warmup_steps,
        "--lr-warmup-init": schedule.initial,
        **({"--lr-wsd-decay-iters": schedule.wsd_steps} if schedule.style == "WSD" else {}),
    }
    facts = {
        **({} if options.training.skip_train else rates),
        _BATCH: job.batch.total,
        "--seq-length": job.seq_length,
        **{flag_for(name): options.value(name) for name in names},
        **{f"the dtype of {what}": dtype for what, dtype in job.dtypes.items()},
        "--megatron-fsdp-weight-format": job.weight_formats,
        "--data-path": f"text with checksum {data.checksum[:16]}",
        "the number of tokens to train on": data.training.count,  # the index of a pair decides it, too
        "the token that ends a text": data.end_id,
        **{f"{name} of the model": value for name, value in config_values(options.model, data.vocab_size).items()},
    }
    return {name: str(value) for name, value in facts.items()}


# ---- loading and saving ----------------------------------------------------------------------------------------------


class RunCheckpoints:
    """The checkpoints of one run of the trainer; without folders it does nothing. Every method is collective.

    A save that fails, as on a full disk, is reported and counted, and training goes on: earlier saves stay intact.
    """

    def __init__(self, job: Job, trained: Trained, data: TokenData, origin: Origin, say: Say) -> None:
        self.is_interrupted = False
        self._job, self._trained, self._origin, self._say = job, trained, origin, say
        self._options = options = job.options.checkpoint
        self._state = TrainingState(facts_of(job, data) if options.save or options.load else {})
        self._saved = -1
        self._is_saving = False  # in the background, with an end that is not known yet
        self._problems: list[CheckpointError] = []  # of the newest saves in a row that failed
        self._checkpointer: Checkpointer | None = None
        if (folder := options.save) is not None:
            self._checkpointer = Checkpointer(folder, keep_last=options.keep_last, in_background=options.async_save)

    @contextmanager
    def until_saved(self) -> Iterator[None]:
        """Save inside the block; after success wait for the last save, which must succeed.

        With a folder, SIGINT, SIGTERM, SIGHUP and SIGUSR1 do not end the process inside the block: `is_interrupted`
        becomes true on this rank, and the loop lets the ranks agree, saves and ends; a second SIGINT ends it at once.
        """
        if self._checkpointer is None:
            yield
            return
        handlers = {number: signal.signal(number, self._interrupt) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._await()  # not after an error, when peers may be gone
        self._checkpointer.close()
        if self._problems:
            raise self._not_saved(f"the last save failed: {self._problems[-1]}") from self._problems[-1]

    def start(self) -> Progress:
        """Load the requested checkpoint, write the map of parameter groups if requested, and return the progress."""
        options, job, load = self._options, self._job, self._origin.folder
        if load is not None:
            self._load(load)
        done, total = self._state.progress, job.train_iters
        if done.steps >= total and not job.options.training.skip_train:
            if done.steps > total or not job.load_is_optional:
                raise ConfigurationError(
                    f"--load {load} has {done.steps} steps already: give --train-iters above {done.steps}"
                )
            self._say(f"{load} has all {total} steps: the training is done")  # started again by the same command
        saved = [] if self._checkpointer is None else self._checkpointer.store.iterations()
        if saved and saved[-1] > done.steps:
            newer = f"--save {options.save} holds a checkpoint of step {saved[-1]}"
            if not job.load_is_optional:
                raise ConfigurationError(
                    f"{newer}, and this run begins after step {done.steps}: give --load {options.save} to go on from "
                    "there, or another folder"
                )
            self._say(f"{newer}, which its pointer does not name: going on from step {done.steps} replaces it")
        if (folder := options.dump_param_to_param_group_map) is not None:
            dump_param_to_param_group_map(self._trained.model, self._trained.optimizer, folder)
            self._say(f"wrote the map of parameter groups: {folder}")
        return done

    def changes(self) -> list[str]:
        """Describe the facts that have changed since the checkpoint of `start` was saved."""
        return changes_of(self._state.saved_facts, self._state.facts)

    @property
    def owes_evaluation(self) -> bool:
        """True if the loaded run ended before an evaluation that was due."""
        return self._state.owes_evaluation

    def save(self, progress: Progress, *, owes_evaluation: bool = False) -> None:
        """Save, if there is a folder and this step is not saved yet; one failure too many is a `NotSavedError`."""
        if self._checkpointer is None or progress.steps == self._saved:
            return
        self._state.owes_evaluation = owes_evaluation
        self._state.progress = decided_by_first(lambda: progress, "saving")  # clocks differ, and any rank may write it
        self._await()
        options, trained = self._options, self._trained
        try:
            path = self._checkpointer.save(
                progress.steps,
                trained.model,
                None if options.no_save_optim else trained.optimizer,
                extra=self._extra(),
                with_rng=not options.no_save_rng,
                overwrite=True,  # leftovers of an abandoned run; the folder is this run's alone
            )
        except CheckpointError as error:
            self._note_failed(error)
            return
        self._saved, self._is_saving = progress.steps, True
        if options.async_save:
            self._say(f"step {progress.steps:>5}: saving {path}")
        else:
            self._await()
            self._say(f"saved {path}")

    def _await(self) -> None:
        """Wait for the save in the background, if any, and record its result."""
        if self._checkpointer is None or not self._is_saving:
            return
        self._is_saving = False
        try:
            self._checkpointer.wait()
        except CheckpointError as error:
            self._note_failed(error)
        else:
            self._problems.clear()

    def _note_failed(self, error: CheckpointError) -> None:
        """Count a failed save; one too many is a `NotSavedError`."""
        self._problems.append(error)
        self._saved = -1
        count, limit = len(self._problems), self._job.options.recovery.max_failed_saves
        if count > limit:
            what = f"{error}: {count} saves in a row failed, and --max-failed-saves is {limit}"
            raise self._not_saved(what) from error
        self._say(
            f"WARNING: {error}: {count} of at most {limit} saves in a row failed; training goes on, and what was saved "
            "before is as it was"
        )

    def _not_saved(self, what: str) -> NotSavedError:
        folder = self._options.save
        return NotSavedError(
            f"{what}; what was saved before is as it was. Make room in {folder}, or give another folder, and go on "
            f"with --load {folder}"
        )

    def _load(self, folder: Path) -> None:
        options, trained, is_own = self._options, self._trained, self._origin.is_own
        finetunes = options.finetune and not is_own
        without_optimizer = finetunes or (options.no_save_optim if is_own else options.no_load_optim)
        without_rng = finetunes or (options.no_save_rng if is_own else options.no_load_rng)
        extra = {} if finetunes else self._extra()
        fresh = {name: state.state_dict() for name, state in extra.items()}
        strict = options.is_strict
        verifies = options.verify_integrity if self._job.options.is_given("verify_integrity") else None  # if it has any
        try:
            with _own_group_options(trained.optimizer):
                report: LoadReport = load_checkpoint(
                    trained.model,
                    None if without_optimizer else trained.optimizer,
                    folder,
                    extra=extra,
                    with_rng=not without_rng,
                    strict=strict,
                    verify=False if self._origin.is_compared else verifies,
                    view=view_for(trained.model, self._job.batch.total, fresh, strict=strict),
                )
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(*_STRICT)) from error
        progress = self._state.progress
        self._say(f"loaded {folder}: step {progress.steps}, {progress.elapsed_s:.0f} s of training\n{report}")
        for change in self.changes():
            self._say(f"not as it was saved, so losses may differ from one run: {change}")

    def _extra(self) -> dict[str, Any]:
        """Return the state beside weights and optimizer: the loop's own and, in float16, the loss scale."""
        scale = self._trained.scale
        return {"trainer": self._state} if scale is None else {"trainer": self._state, "loss_scale": scale}

    def _interrupt(self, number: int, _: object) -> None:
        if self.is_interrupted and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.is_interrupted = True


@contextmanager
def _own_group_options(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep this run's options of each parameter group during a load inside the block.

    An optimizer's `load_state_dict` restores weight decay, betas and so on as they were saved, and would silently drop
    this run's. State is not touched.
    """
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(options)
