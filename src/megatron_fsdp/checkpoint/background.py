"""Saving while training goes on: copy the state, hand back control, write the copy from a thread."""

from __future__ import annotations

import threading
import uuid
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_fsdp.checkpoint.ranks import world_size_of
from megatron_fsdp.checkpoint.settle import SaveErrors, decided_by_first, raise_settled
from megatron_fsdp.checkpoint.staging import StagingBuffers
from megatron_fsdp.comm.groups import twin_of
from megatron_fsdp.errors import ConfigurationError

Save = Callable[[Any, "dist.ProcessGroup | None"], object]
"""Saves a state, collectively over a group: `save(state, group)`."""


class _Outcome:
    """What the last save met, until it has been raised."""

    error: BaseException | None = None

    def take(self) -> BaseException | None:
        error, self.error = self.error, None
        return error


class BackgroundSaver:
    """Saves states from a thread, one at a time, with one copy of this rank's part in host memory.

        saver = BackgroundSaver()
        saver.start(state, lambda state, group: store.over(group).write(10, writer_of(state, group)))
        ...                                     # training goes on; it may change what was saved
        saver.close()                           # or wait(); before torch.distributed is taken down

    The thread speaks over a gloo group of its own, so that its collectives never meet those of training. What it raises
    on any rank is raised on all ranks, once: by the next `wait`, `start` or `close`. It is no daemon: Python waits for
    it before it exits. What nobody has asked for by then is warned about.

    `dcp.async_save` is not used: it takes any number of saves at once, makes no group, raises on the ranks that meet an
    error only, and its stagers do not serve (see `staging`).

    Attributes:
        group: The ranks, over gloo; None where there is this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        """Make the group of the thread; collective over the ranks.

        Args:
            group: Whose ranks save; None: all, or this process alone where torch.distributed is not initialised.
            timeout: How long ranks wait for each other while they save; None: torch's default.
        """
        self.group = _gloo_twin(group, timeout)
        self._buffers = StagingBuffers()
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        self._is_closed = False
        weakref.finalize(self, _warn_of_untold, self._outcome)

    @property
    def staged_bytes(self) -> int:
        """Bytes of the last copy: this rank's part of the state, each memory counted once."""
        return self._buffers.staged_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that are kept for copies, with what alignment adds."""
        return self._buffers.reserved_bytes

    @property
    def is_saving(self) -> bool:
        """Whether the thread is at work on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, state: Any, save: Save) -> None:
        """Copy a state and save the copy in the background; waits for the save before, if there is one.

        Call it on all ranks in the same order. It communicates nothing itself: what fails while copying on one rank is
        raised later, on all.

        Args:
            state: Nested dicts, lists and tuples of tensors, DTensors and objects; at the top a dict that may also hold
                what has a `state_dict()`.
            save: Called as `save(copy, group)` in the thread of every rank. The copy is overwritten by the next save.

        Raises:
            CheckpointError: What the save before has met; nothing is started.
            ConfigurationError: The saver is closed.
        """
        if self._is_closed:
            raise ConfigurationError("this BackgroundSaver is closed; make another one")
        self.wait()
        copied, problem = None, None
        try:
            copied = self._buffers.copy(state)
        except Exception as error:  # noqa: BLE001  the thread tells the other ranks, who are about to wait for this one
            problem = error
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._thread = threading.Thread(
            target=self._run, args=(copied, problem, save, device), name="megatron_fsdp background save"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being saved.

        Raises:
            CheckpointError: What the save has met on any rank; the same message on every rank, once.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error = self._outcome.take()
        if error is not None:
            raise error

    def close(self) -> None:
        """Finish, and let the memory and the group go; collective. May be called again.

        Raises:
            CheckpointError: As `wait`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._buffers.release()
            if self.group is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, copied: Any, problem: BaseException | None, save: Save, device: int | None) -> None:
        """The thread."""
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)  # of each thread; a writer would use the first device
            raise_settled(problem, "copying the state for a background save", self.group)
            failure: BaseException | None = None
            try:
                self._buffers.wait_until_copied()
                with torch.no_grad():
                    save(copied, self.group)
            except SaveErrors as error:
                failure = error
            raise_settled(failure, "saving in the background", self.group)
        except BaseException as error:  # noqa: BLE001  raised by whoever waits
            self._outcome.error = error


def _gloo_twin(group: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """A new gloo group of the same ranks; None where this process is alone in the world."""
    if world_size_of() == 1:
        return None
    if group is None:
        return dist.new_group(timeout=timeout, backend="gloo")
    name = decided_by_first(lambda: f"megatron_fsdp_background_save_{uuid.uuid4().hex}", "making a group", group)
    return twin_of(group, name, "gloo", timeout)


def _warn_of_untold(outcome: _Outcome) -> None:
    error = outcome.take()
    if error is not None:
        warnings.warn(
            f"a save in the background has failed, and nobody has asked: {error}; call wait() or close()",
            RuntimeWarning,
            stacklevel=2,
        )
