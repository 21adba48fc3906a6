"""Background saves: copy the state to host memory, return to training, write the copy from a thread."""

from __future__ import annotations

import copy
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp.checkpoint.report import decided_by_first, together
from megatron_fsdp.comm.agreement import world_size_of
from megatron_fsdp.comm.groups import duplicate_group, timeout_of
from megatron_fsdp.dtensor.shard_spec import carry_description
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError, ConfigurationError, MegatronFSDPError, RankError

ALIGNMENT_BYTES = 64
ARENA_BYTES = 512 * 1024 * 1024
"""Bytes of one block of memory; a power of two, to which torch's pinned allocator rounds up."""

Save = Callable[[Any, "dist.ProcessGroup | None"], object]
"""Saves a state, collectively over a group: `save(state, group)`."""


class StagingBuffers:
    """Host memory for one copy of a state, reused by the next copy; `staged_bytes` counts each memory of it once.

    The stagers of torch 2.13 are not used: `StateDictStager` fails on our DTensors, copies whole storages if a state
    uses part of a flat buffer, and allocates anew for new tensors; `BlockingAsyncStager` does not copy scalar DTensors,
    copies others twice, drops descriptions of local tensors, and needs an accelerator to keep its memory.
    """

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self.staged_bytes = 0
        self._arena_bytes = arena_bytes
        self._arenas: list[torch.Tensor] = []
        self._events: list[torch.Event] = []

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all blocks, with alignment, used or not."""
        return sum(arena.nbytes for arena in self._arenas)

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Copy this rank's part of a state: the same nesting, tensors in host memory; the previous copy is overwritten.

        Copies from a device are queued behind the work of its current stream: call `wait_until_copied` before reading.
        """
        if isinstance(state, dict):  # torch also calls `state_dict()` of objects at the top level
            state = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state.items()}
        frozen = tree_map(lambda value: value if isinstance(value, torch.Tensor) else copy.deepcopy(value), state)
        sources: dict[Any, torch.Tensor] = {}
        for value in tree_leaves(frozen):
            if isinstance(value, torch.Tensor):
                local = _local(value)
                sources.setdefault(_memory(local), local)
        self.staged_bytes = sum(local.nbytes for local in sources.values())
        devices = {local.device for local in sources.values() if _is_remote(local.device)}
        try:
            places = self._places([local.nbytes for local in sources.values()], pinned=bool(devices))
            staged = {
                key: _tensor_at(arena, first, local).copy_(local, non_blocking=_is_remote(local.device))
                for (key, local), (arena, first) in zip(sources.items(), places, strict=True)
            }
        finally:  # memory that a copy is under way to must not go before it has arrived
            self._events = [_recorded(device) for device in devices]
        return tree_map(lambda value: _like(value, staged) if isinstance(value, torch.Tensor) else value, frozen)

    def wait_until_copied(self) -> None:
        """Block until the last copy is complete; from any thread."""
        for event in self._events:
            event.synchronize()

    def release(self) -> None:
        """Free the memory."""
        self.wait_until_copied()
        self._arenas = []
        self._events = []

    def _places(self, sizes: Sequence[int], pinned: bool) -> list[tuple[torch.Tensor, int]]:
        """Return a block and the offset in it for each size, one after the other in as few blocks as possible."""
        used, places = [0], []
        for size in sizes:
            if used[-1] and used[-1] + size > self._arena_bytes:
                used.append(0)
            places.append((len(used) - 1, used[-1]))
            used[-1] += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        kept = zip(self._arenas, used, strict=False)
        # Blocks are reused unless one is too small or the kind of memory differs.
        if len(self._arenas) < len(used) or any(a.nbytes < size or a.is_pinned() != pinned for a, size in kept):
            self._arenas = []  # freed before new memory is allocated
            self._arenas = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in used]
        return [(self._arenas[arena], first) for arena, first in places]


def _tensor_at(arena: torch.Tensor, first: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage has just its bytes: torch writes the whole storage of tensors in objects."""
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    memory = arena.numpy()[first : first + like.nbytes]  # lives as long as a tensor over it does
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided
    if not is_plain or local.is_meta or local.is_quantized:
        raise CheckpointError(
            f"a {type(local).__name__} ({local.layout}, on {local.device}) cannot be copied for a background save; "
            "save it in the foreground, or give a plain tensor"
        )
    return local


def _memory(local: torch.Tensor) -> Any:
    """Return a key that is equal for tensors with the same elements of the same memory."""
    if local.numel() == 0:
        return (local.dtype, tuple(local.shape))
    bits = (local.is_conj(), local.is_neg())
    return (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), bits)


def _like(tensor: torch.Tensor, staged: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """Return a copy's tensor of the same kind."""
    local = _local(tensor)
    found = staged[_memory(local)]
    if not isinstance(tensor, DTensor):
        return found
    # A view is an object of its own: several tensors of one memory may carry descriptions of their own.
    found = found.view(found.shape)
    carry_description(local, found)
    if isinstance(tensor, UnevenDTensor):
        return UnevenDTensor.wrap(found, tensor.shard_spec)
    # The constructor, since `from_local` would move the copy to the device of the mesh.
    return DTensor(found, tensor._spec, requires_grad=False)


def _is_remote(device: torch.device) -> bool:
    return device.type != "cpu"


def _recorded(device: torch.device) -> torch.Event:
    """Record an event on the current stream of a device."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


class BackgroundSaver:
    """Saves states from a thread, one at a time, with one copy of this rank's part in host memory.

        saver = BackgroundSaver()
        saver.start(state, lambda state, group: store.write(10, writer_of(state, group), group=group))
        ...                                     # training goes on; it may change the saved tensors
        saver.close()                           # or wait(); before torch.distributed is taken down

    The thread uses a gloo group of its own, so that its collectives never meet those of training. What it raises
    on any rank is raised on all ranks, once: by the next `wait`, `start` or `close`. It is no daemon: Python waits for
    it before it exits. An error that was not raised by then is a warning.

    `dcp.async_save` is not used: it takes any number of saves at once, makes no group, raises only on the ranks with an
    error, and its stagers do not work here (see `StagingBuffers`).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Create the group of the thread; collective over the ranks."""
        self.group = _gloo_copy(group)  # over gloo; None where there is this process alone
        self.buffers = StagingBuffers()  # host memory of the copies
        self._pool = ThreadPoolExecutor(1, "megatron_fsdp background save")
        self._saves: list[Future[None]] = []  # the last one, until its error has been raised
        self._is_closed = False
        weakref.finalize(self, _warn_of_unraised, self._saves)

    def start(self, state: Any, save: Save) -> None:
        """Copy a state and save the copy in the background; waits for the previous save, if any.

        Call it on all ranks in the same order. It communicates nothing itself: an error while copying on one rank is
        raised later, on all.

        Args:
            state: Nested dicts, lists and tuples of tensors, DTensors and objects; at the top a dict that may also hold
                what has a `state_dict()`.
            save: Called as `save(copy, group)` in the thread of every rank. The copy is overwritten by the next save.

        Raises:
            CheckpointError: The previous save failed; nothing is started.
            ConfigurationError: The saver is closed.
        """
        if self._is_closed:
            raise ConfigurationError("this BackgroundSaver is closed; make another one")
        self.wait()
        copied = Future[Any]()
        try:
            copied.set_result(self.buffers.copy(state))
        except Exception as error:  # noqa: BLE001  the thread reports it to the other ranks, which are about to wait for this one
            copied.set_exception(error)
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._saves.append(self._pool.submit(self._run, copied, save, device))

    def wait(self) -> None:
        """Wait for the running save."""
        if self._saves:
            self._saves[0].exception()  # an interrupted wait can be repeated
            self._saves.pop().result()

    def close(self) -> None:
        """Finish, and free the memory and the group; collective. It may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self.buffers.release()
            if self.group is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)

    def _run(self, copied: Future[Any], save: Save, device: int | None) -> None:
        """Save the copy in the thread."""
        if device is not None:
            torch.accelerator.set_device_index(device)  # of each thread; a writer would use the first device

        def arrived() -> Any:
            self.buffers.wait_until_copied()
            return copied.result()

        try:
            state = together("copying the state for a background save", arrived, self.group)
            with torch.no_grad():
                together("saving in the background", lambda: save(state, self.group), self.group)
        except (MegatronFSDPError, RuntimeError) as error:  # torch.distributed was taken down, or its back end failed
            if isinstance(error, MegatronFSDPError) and not isinstance(error, RankError):
                raise
            raise CheckpointError(
                f"ranks of a save in the background cannot reach each other any more ({error}); if none has failed, "
                "close the Checkpointer (or wait() for it) before destroy_process_group()"
            ) from error


def _gloo_copy(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Make a gloo group of the same ranks; return None if this process is alone."""
    if world_size_of() == 1:
        return None
    timeout = timeout_of(group or distributed_c10d._get_default_group())
    if group is None:
        return dist.new_group(backend="gloo", timeout=timeout)
    name = decided_by_first(lambda: f"megatron_fsdp_background_save_{uuid.uuid4().hex}", "making a group", group)
    return duplicate_group(group, name, "gloo", timeout)


def _warn_of_unraised(saves: Sequence[Future[None]]) -> None:
    for save in saves:
        error = save.exception() if save.done() else None
        if error is not None:
            warnings.warn(
                f"a save in the background has failed, and nobody has asked: {error}; call wait() or close()",
                RuntimeWarning,
                stacklevel=2,
            )
