"""Checkpoints of the training loop: loads one to resume from, saves on the way and when interrupted."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from megatron_fsdp.checkpoint import Checkpointer, LoadReport, load_checkpoint
from megatron_fsdp.checkpoint.convert.groups import dump_param_to_param_group_map
from megatron_fsdp.checkpoint.store import iteration_of
from megatron_fsdp.comm.agreement import decided_by_first
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train.launch.failures import NotSavedError
from megatron_fsdp.train.loop import Run
from megatron_fsdp.train.models.megatron_checkpoint import view_for
from megatron_fsdp.train.progress import Progress, TrainingState, facts_of
from megatron_fsdp.train.recovery.resuming import Origin

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunCheckpoints:
    """The checkpoints of one run of the trainer; without folders it does nothing. Every method is collective.

    While it is entered and there is a folder to save to, SIGINT and SIGTERM no longer end the process: `is_interrupted`
    becomes true on this rank, and the loop lets the ranks agree, saves and ends; a second SIGINT ends it at once.
    `is_finished` is true after `start` where an earlier run of the same command has done all steps.

    A save that fails, as on a full disk, is reported and counted, and training goes on: earlier saves stay intact.
    """

    def __init__(self, run: Run, origin: Origin, say: Callable[[str], None]) -> None:
        """Prepare the checkpoints of a run.

        Args:
            run: What is trained.
            origin: Where it begins.
            say: Shows a line or several to the user, on the first rank.
        """
        self.is_interrupted = False
        self.is_finished = False
        self._run, self._origin = run, origin
        self._say = say
        self._options = options = run.job.options.checkpoint
        self._state = TrainingState(facts_of(run.job, run.data) if options.save or options.load else {})
        self._saved = -1
        self._failed_saves = 0
        self._is_saving = False  # in the background, with an end that is not known yet
        self._problem: CheckpointError | None = None  # of the newest save, where it failed
        self._replaceable: frozenset[int] = frozenset()
        self._handlers: dict[signal.Signals, Any] = {}
        self._checkpointer: Checkpointer | None = None
        if options.save is not None:
            self._checkpointer = Checkpointer(
                options.save, keep_last=options.keep_last, in_background=options.async_save
            )

    def __enter__(self) -> Self:
        if self._checkpointer is not None:
            self._handlers = {number: signal.signal(number, self._interrupt) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if raised is None:  # after an error peers may be gone: nothing to agree on
            self._finish()

    def start(self) -> Progress:
        """Load the requested checkpoint, and write the map of parameter groups if it was requested.

        Returns:
            How far training is.

        Raises:
            CheckpointError: The checkpoint cannot be loaded; the same on every rank.
            ConfigurationError: There is nothing left to train, or the folder to save to is further than this run or
                cannot be written.
        """
        options, run, load = self._options, self._run, self._origin.folder
        total = run.job.train_iters
        saved = [] if self._checkpointer is None else self._checkpointer.store.iterations()
        if load is not None:
            self._load(load)
        steps = self._state.progress.steps
        is_measured_only = run.job.options.training.skip_train
        if steps == total and run.job.load_is_optional and not is_measured_only:  # started again by the same command
            self.is_finished = True
            self._say(f"{load} has all {total} steps: the training is done")
            return self._state.progress
        if steps >= total and not is_measured_only:
            raise ConfigurationError(f"--load {load} has {steps} steps already: give --train-iters above {steps}")
        if saved and saved[-1] > steps:
            self._meet_later_ones(saved[-1], steps)
        if options.save is not None:
            folder = options.save
            self._replaceable = decided_by_first(lambda: _numbers_in(folder, above=steps), f"looking into {folder}")
        if options.dump_param_to_param_group_map is not None:
            folder = options.dump_param_to_param_group_map
            dump_param_to_param_group_map(run.trained.model, run.trained.optimizer, folder)
            self._say(f"wrote the map of parameter groups: {folder}")
        return self._state.progress

    def is_due(self, step: int) -> bool:
        """Return whether to save after a step that is not the last one."""
        every = self._options.save_interval
        return self._checkpointer is not None and every is not None and step % every == 0

    def save(self, progress: Progress) -> None:
        """Save, if there is a folder and this step was not saved yet.

        Raises:
            NotSavedError: It could not be saved, nor could as many before it as are allowed to fail; on every rank.
        """
        if self._checkpointer is None or progress.steps == self._saved:
            return
        self._state.progress = progress
        if self._is_saving:
            self._await()
        try:
            with in_options():
                path = self._start_saving(self._checkpointer, progress)
        except CheckpointError as error:
            self._note_failed(error)
            return
        self._saved, self._is_saving = progress.steps, self._options.async_save
        if not self._is_saving:
            self._failed_saves, self._problem = 0, None
        self._say(f"step {progress.steps:>5}: saving {path}" if self._is_saving else f"saved {path}")

    def _start_saving(self, checkpointer: Checkpointer, progress: Progress) -> Path:
        options, trained = self._options, self._run.trained
        return checkpointer.save(
            progress.steps,
            trained.model,
            None if options.no_save_optim else trained.optimizer,
            extra=self._extra(),
            with_rng=not options.no_save_rng,
            overwrite=progress.steps in self._replaceable,
        )

    def _await(self) -> None:
        """Wait for the save in the background and record its result."""
        assert self._checkpointer is not None
        self._is_saving = False
        try:
            with in_options():
                self._checkpointer.wait()
        except CheckpointError as error:
            self._note_failed(error)
        else:
            self._failed_saves, self._problem = 0, None

    def _note_failed(self, error: CheckpointError) -> None:
        """Count a save that failed.

        Raises:
            NotSavedError: It was one too many.
        """
        self._failed_saves, self._problem, self._saved = self._failed_saves + 1, error, -1
        limit = self._run.job.options.recovery.max_failed_saves
        if self._failed_saves > limit:
            raise NotSavedError(
                f"{error}: {self._failed_saves} saves in a row failed, and --max-failed-saves is {limit}; what was "
                f"saved before is as it was. Make room in {self._options.save}, or give another folder, and go on with "
                f"--load {self._options.save}"
            ) from error
        self._say(
            f"WARNING: {error}: {self._failed_saves} of at most {limit} saves in a row failed; training goes on, and "
            "what was saved before is as it was"
        )

    def _finish(self) -> None:
        """Wait for the save in the background; the last one must succeed.

        Raises:
            NotSavedError: It failed.
        """
        if self._checkpointer is None:
            return
        if self._is_saving:
            self._await()
        self._checkpointer.close()
        if self._problem is not None:
            raise NotSavedError(
                f"the last save failed: {self._problem}; what was saved before is as it was. Make room in "
                f"{self._options.save}, or give another folder, and go on with --load {self._options.save}"
            ) from self._problem

    def _meet_later_ones(self, newest: int, steps: int) -> None:
        """Decide about checkpoints of later steps than this run begins at."""
        save = self._options.save
        if not self._run.job.load_is_optional:
            raise ConfigurationError(
                f"--save {save} holds a checkpoint of step {newest}, and this run begins after step {steps}: "
                f"give --load {save} to go on from there, or another folder"
            )
        self._say(
            f"{save} holds a checkpoint of step {newest} that its pointer does not name: this run goes on from step "
            f"{steps}, and replaces what it comes to again"
        )

    def _load(self, folder: Path) -> None:
        options, run, is_own = self._options, self._run, self._origin.is_own
        finetunes = options.finetune and not is_own
        without_optimizer = finetunes or (options.no_save_optim if is_own else options.no_load_optim)
        without_rng = finetunes or (options.no_save_rng if is_own else options.no_load_rng)
        extra = {} if finetunes else self._extra()
        fresh = {name: state.state_dict() for name, state in extra.items()}
        strict = options.strict_fsdp_dtensor_load
        with in_options(), _own_group_options(run.trained.optimizer):
            report: LoadReport = load_checkpoint(
                run.trained.model,
                None if without_optimizer else run.trained.optimizer,
                folder,
                extra=extra,
                with_rng=not without_rng,
                strict=strict,
                verify=self._compares,
                view=view_for(run.trained.model, run.job.batch.total, fresh, strict=strict),
            )
        progress = self._state.progress
        self._say(f"loaded {folder}: step {progress.steps}, {progress.elapsed_s:.0f} s of training\n{report}")
        for change in self._state.changes():
            self._say(f"not as it was saved, so losses may differ from one run: {change}")

    @property
    def _compares(self) -> bool | None:
        """Whether to verify checksums on load; None: where the checkpoint has some."""
        if self._origin.is_compared:
            return False
        options = self._run.job.options
        return options.checkpoint.verify_integrity if options.is_given("verify_integrity") else None

    def _extra(self) -> dict[str, Any]:
        """Return what is saved beside weights and optimizer: the loop's state and, in float16, the loss scale."""
        scale = self._run.trained.scale
        return {"trainer": self._state} if scale is None else {"trainer": self._state, "loss_scale": scale}

    def _interrupt(self, number: int, _: object) -> None:
        if self.is_interrupted and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.is_interrupted = True


_OPTION_OF = {
    "pass strict=False to load what fits": "give --no-strict-fsdp-dtensor-load to load what fits, or --no-load-optim "
    "where only the optimizer does not",
    "pass overwrite=True to replace it, or save another iteration": "it was not there when this run began, so another "
    "one may be saving here: move it away, or give another folder to --save",
}


@contextmanager
def _own_group_options(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep this run's options of each parameter group, whatever is loaded inside the block.

    An optimizer's `load_state_dict` restores weight decay, betas and so on as they were saved, and would silently drop
    what was given to this run. State is not touched.
    """
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(options)


@contextmanager
def in_options() -> Iterator[None]:
    """Name the trainer's options in errors of the library that name arguments.

    Raises:
        CheckpointError: The block raised it.
    """
    try:
        yield
    except CheckpointError as error:
        message = str(error)
        for argument, option in _OPTION_OF.items():
            message = message.replace(argument, option)
        if message == str(error):
            raise
        raise CheckpointError(message) from error


def _numbers_in(folder: Path, above: int) -> frozenset[int]:
    """Return the steps above `above` that folders of checkpoints are named after, whole or not."""
    found = (iteration_of(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return frozenset(number for number in found if number is not None and number > above)
