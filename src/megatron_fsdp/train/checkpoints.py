"""Where the training loop meets its checkpoints: go on from one, save on the way, save when interrupted."""

import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_fsdp.checkpoint import Checkpointer, LoadReport, load_checkpoint
from megatron_fsdp.checkpoint.convert.group_map import dump_param_to_param_group_map
from megatron_fsdp.checkpoint.run_folder import iteration_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train.launch.ranks import agree
from megatron_fsdp.train.loop import Run
from megatron_fsdp.train.progress import Progress, TrainingState, facts_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunCheckpoints:
    """The checkpoints of one run of the trainer; without folders it does nothing. Every method is collective.

    While it is entered and there is a folder to save to, SIGINT and SIGTERM no longer end the process: `is_interrupted`
    becomes true on this rank, and the loop lets the ranks agree, saves and ends. `is_finished` is true after
    `start` where an earlier run of the same command has done all steps.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        """Checkpoints of a run.

        Args:
            run: What is trained.
            say: Shows a line or several to the user, on the first rank.
        """
        self.is_interrupted = False
        self.is_finished = False
        self._run = run
        self._say = say
        self._options = options = run.job.options.checkpoint
        self._state = TrainingState(facts_of(run.job, run.data) if options.save or options.load else {})
        self._saved = -1
        self._replaceable: frozenset[int] = frozenset()
        self._handlers: dict[signal.Signals, Any] = {}
        self._checkpointer: Checkpointer | None = None
        if options.save is not None:
            self._checkpointer = Checkpointer(
                options.save, keep_last=options.keep_last, in_background=options.async_save
            )

    @property
    def saves(self) -> bool:
        """Whether there is a folder to save to."""
        return self._checkpointer is not None

    def __enter__(self) -> Self:
        if self.saves:
            self._handlers = {number: signal.signal(number, self._interrupt) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if raised is None and self._checkpointer is not None:  # after an error peers may be gone: nothing to agree on
            with in_options():
                self._checkpointer.close()

    def start(self) -> Progress:
        """Load what was asked for, and write the map of parameter groups if it was.

        Returns:
            How far training is.

        Raises:
            CheckpointError: What there is cannot be loaded; the same on every rank.
            ConfigurationError: There is nothing left to train, or the folder to save to is further than this run or
                cannot be written.
        """
        options, run = self._options, self._run
        load = self._load_folder
        total = run.job.train_iters
        newest = self._newest_saved()
        if load is not None and not (self._is_restarted and self._holds_nothing()):
            self._load(load)
        elif load is not None:
            self._say(f"{load} holds no checkpoint yet: starting from the first step")
        steps = self._state.progress.steps
        if steps == total and self._is_restarted:
            self.is_finished = True
            self._say(f"{load} has all {total} steps: the training is done, and there is nothing left to do")
            return self._state.progress
        if steps >= total:
            raise ConfigurationError(f"--load {load} has {steps} steps already: give --train-iters above {steps}")
        if newest is not None and newest > steps:
            self._meet_later_ones(newest, steps)
        if options.save is not None:
            folder = options.save
            agree(run.rank, lambda: require_writable(folder))
            self._replaceable = agree(run.rank, lambda: numbers_in(folder, above=steps))
        if options.dump_param_to_param_group_map is not None:
            folder = options.dump_param_to_param_group_map
            dump_param_to_param_group_map(run.trained.model, run.trained.optimizer, folder)
            self._say(f"wrote the map of parameter groups: {folder}")
        return self._state.progress

    def is_due(self, step: int) -> bool:
        """Whether to save after a step, as long as it is not the last one."""
        every = self._options.save_interval
        return self.saves and every is not None and step % every == 0

    def save(self, progress: Progress) -> None:
        """Save, if there is a folder and this step was not saved yet.

        Raises:
            CheckpointError: It could not be saved, or the one before, in the background; the same on every rank.
        """
        if self._checkpointer is None or progress.steps == self._saved:
            return
        options, run = self._options, self._run
        self._state.progress = progress
        optimizer = None if options.no_save_optim else run.trained.optimizer
        extra, with_rng = self._extra(), not options.no_save_rng
        overwrite = progress.steps in self._replaceable
        with in_options():
            path = self._checkpointer.save(
                progress.steps, run.trained.model, optimizer, extra=extra, with_rng=with_rng, overwrite=overwrite
            )
        self._saved = progress.steps
        self._say(f"step {progress.steps:>5}: saving {path}" if options.async_save else f"saved {path}")

    @property
    def _is_restarted(self) -> bool:
        """Whether this is a job that is started again and again with the same command."""
        return self._run.job.load_is_optional

    @property
    def _load_folder(self) -> Path | None:
        """Where to go on from: what was said; ranks that were started again go on from what they saved."""
        return self._options.load or (self._options.save if self._is_restarted else None)

    def _holds_nothing(self) -> bool:
        return self._checkpointer is not None and self._checkpointer.latest() is None

    def _meet_later_ones(self, newest: int, steps: int) -> None:
        """What to do about checkpoints that are further than this run begins."""
        save = self._options.save
        if not self._is_restarted:
            raise ConfigurationError(
                f"--save {save} holds a checkpoint of step {newest}, and this run begins after step {steps}: "
                f"give --load {save} to go on from there, or another folder"
            )
        self._say(
            f"{save} holds a checkpoint of step {newest} that its pointer does not name: this run goes on from step "
            f"{steps}, and replaces what it comes to again"
        )

    def _load(self, folder: Path) -> None:
        options, run = self._options, self._run
        finetunes = options.finetune
        with in_options():
            report: LoadReport = load_checkpoint(
                run.trained.model,
                None if options.no_load_optim or finetunes else run.trained.optimizer,
                folder,
                extra=None if finetunes else self._extra(),
                with_rng=not (options.no_load_rng or finetunes),
                strict=options.strict_fsdp_dtensor_load,
                verify=options.verify_integrity,
            )
        progress = self._state.progress
        self._say(f"loaded {folder}: step {progress.steps}, {progress.elapsed_s:.0f} s of training\n{report}")
        for change in self._state.changes():
            self._say(f"not as it was saved, so losses may differ from one run: {change}")

    def _extra(self) -> dict[str, Any]:
        """What is saved beside weights and optimizer: the loop's own state and, in float16, the scale of the loss."""
        scale = self._run.trained.scale
        return {"trainer": self._state} if scale is None else {"trainer": self._state, "loss_scale": scale}

    def _newest_saved(self) -> int | None:
        if self._checkpointer is None:
            return None
        found = self._checkpointer.store.iterations()
        return found[-1] if found else None

    def _interrupt(self, *_: object) -> None:
        self.is_interrupted = True


_OPTION_OF = {
    "pass strict=False to load what fits": "give --no-strict-fsdp-dtensor-load to load what fits, or --no-load-optim "
    "where only the optimizer does not",
    "pass overwrite=True to replace it, or save another iteration": "it was not there when this run began, so another "
    "one may be saving here: move it away, or give another folder to --save",
}


@contextmanager
def in_options() -> Iterator[None]:
    """Errors of the library with the trainer's options where they name arguments.

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


def numbers_in(folder: Path, above: int) -> frozenset[int]:
    """The steps above one that folders of checkpoints here are named after, whole or not."""
    found = (iteration_of(path.name) for path in folder.iterdir())
    return frozenset(number for number in found if number is not None and number > above)


def require_writable(folder: Path) -> None:
    """Make a folder, and write to it, so that a run does not find out after the training that it cannot.

    Raises:
        ConfigurationError: It cannot be made or written.
    """
    probe = folder / f".probe-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"--save {folder} cannot be written ({error.strerror}): give a folder that can be"
        ) from error
