"""The checkpoints of a run: save now or in the background, load the latest or a chosen one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint import naming, optimizer_state, rng
from megatron_fsdp.checkpoint.background import BackgroundSaver
from megatron_fsdp.checkpoint.load import facts_of, load_checkpoint
from megatron_fsdp.checkpoint.naming import ITERATION, MODEL, OPTIMIZER, Extras
from megatron_fsdp.checkpoint.optimizer_state import as_extra
from megatron_fsdp.checkpoint.report import LoadReport, check_group, together
from megatron_fsdp.checkpoint.save import write_state
from megatron_fsdp.checkpoint.save_plan import LastPlan
from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.comm.agreement import agreed, all_agree, over
from megatron_fsdp.errors import CheckpointError, ConfigurationError


class Checkpointer:
    """Saves and loads model, optimizer, random states and more; every method is collective.

        with Checkpointer("runs/a", keep_last=3, in_background=True) as checkpoints:
            report = checkpoints.load(model, optimizer, extra={"schedule": schedule}) if checkpoints.latest() else None
            for step in range(report.iteration if report else 0, steps):
                ...
                checkpoints.save(step + 1, model, optimizer, extra={"schedule": schedule})

    A save is published whole or not at all (docs/checkpoints.md), and from the first one to `close` no other run may
    save in the folder, also between restarts of it. Memory: in the foreground one block of 64 Ki elements
    while checksums are taken, and one tensor of this rank where it has to be copied from a device; in the background
    one copy of this rank's shards in host memory, kept for the next save.

    Attributes:
        store: The folder of the run.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        in_background: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Prepare a checkpointer; nothing is written yet. Collective.

        Args:
            root: Folder of the run, which all ranks share.
            keep_last: How many checkpoints to keep; None: all.
            in_background: Whether `save` returns once the state is copied.
            group: The ranks; None: all, or this process alone.

        Raises:
            ConfigurationError: `keep_last` is no whole number from 1, or ranks give different arguments.
        """
        with all_agree("opening the checkpoints", over(group), CheckpointError) as facts:
            check_group(group)
            self.store = CheckpointStore(root, keep_last=keep_last, group=group)
            facts |= {"keep_last": repr(keep_last), "in_background": str(bool(in_background))}
        self._group = group
        self._is_in_background, self._is_closed = bool(in_background), False
        self._last = LastPlan()
        # Made by the first save: the group that it needs can be made only once ranks agree that they need it.
        self._saver: BackgroundSaver | None = None

    @agreed("saving a checkpoint", lambda self, *_, **__: over(self._group), CheckpointError)
    def save(
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Extras | None = None,
        with_rng: bool = True,
        overwrite: bool = False,
    ) -> Path:
        """Save the current state.

        Args:
            iteration: Steps done; names the checkpoint.
            model: Sharded or not.
            optimizer: Of its parameters; None: not saved.
            extra: More with `state_dict` and `load_state_dict`, by name: a schedule, a scaler, the data, an average.
            with_rng: Whether to save the random states of every rank.
            overwrite: Whether a checkpoint of this iteration may be replaced.

        Returns:
            Where the checkpoint is, or will be once the background save is done.

        Raises:
            CheckpointError: It could not be saved, nothing of it is published, and older ones are as they were; the
                same on every rank. In the background, the *previous* save failed.
            ConfigurationError: The arguments do not belong together, or ranks give different ones.
        """

        def prepare() -> tuple[Path, dict[str, Any]]:
            if self._is_in_background and self._is_closed:
                raise ConfigurationError("this Checkpointer is closed; make another one to save in the background")
            target = self.store.path_of(iteration)
            return target, collect(model, optimizer, iteration, extra, with_rng, self._group)

        facts = {
            "iteration": repr(iteration),
            "overwrite": str(bool(overwrite)),
        } | facts_of(optimizer, extra, with_rng)
        doing = f"saving iteration {iteration!r} in {self.store.root}"
        target, state = together(doing, prepare, self._group, facts)
        place = naming.place_of(model)
        if place.size > 1 and optimizer is not None:  # the stages of a pipeline name the parameter groups of all
            section = state[OPTIMIZER]
            section[optimizer_state.GROUPS] = naming.groups_of_all(section[optimizer_state.GROUPS], place, self._group)

        def write(state: Mapping[str, Any], group: dist.ProcessGroup | None) -> Path:
            return self.store.write(
                iteration,
                lambda folder: write_state(state, folder, group, last=self._last),
                overwrite=overwrite,
                group=group,
            )

        if not self._is_in_background:
            return write(state, self._group)
        if self._saver is None:
            self._saver = BackgroundSaver(self._group)
        self._saver.start(state, write)
        return target

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        iteration: int | None = None,
        extra: Extras | None = None,
        with_rng: bool = True,
        strict: bool = True,
        verify: bool | None = None,
    ) -> LoadReport:
        """Load the latest checkpoint, or that of an iteration; arguments and errors as of `load_checkpoint`."""
        self.wait()
        return load_checkpoint(
            model,
            optimizer,
            self.store.root,
            iteration=iteration,
            extra=extra,
            with_rng=with_rng,
            strict=strict,
            verify=verify,
            group=self._group,
        )

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint; None if there is none yet."""
        return self.store.latest()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: It failed on some rank.
        """
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Finish, free memory and group, and allow other processes to save in the folder.

        Call it before torch.distributed is shut down.

        Raises:
            CheckpointError: As `wait`.
        """
        self._is_closed = True
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    root: str | os.PathLike[str],
    *,
    iteration: int,
    extra: Extras | None = None,
    with_rng: bool = True,
    overwrite: bool = False,
    keep_last: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save one checkpoint, `<root>/iter_0000010`, and point `latest_checkpointed_iteration.txt` to it; collective.

    Arguments and errors as of `Checkpointer` and its `save`.
    """
    with Checkpointer(root, keep_last=keep_last, group=group) as checkpointer:
        return checkpointer.save(iteration, model, optimizer, extra=extra, with_rng=with_rng, overwrite=overwrite)


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    iteration: int,
    extra: Extras | None = None,
    with_rng: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Collect everything that belongs in a checkpoint; only random states are copied."""
    naming.check_names(extra)
    state: dict[str, Any] = {MODEL: naming.model_section(model), ITERATION: iteration}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer_state.collect(optimizer, model)
    if with_rng:
        state |= rng.collect(model, group)
    state |= {name: as_extra(value).state_dict() for name, value in (extra or {}).items()}
    return state
