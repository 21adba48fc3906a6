"""A copy of a state in host memory that is used again for the next one.

The stagers of torch 2.13 do not serve. `StateDictStager` stops at our DTensors ("invalid python storage"); it copies
whole storages, so a state that takes some of a flat buffer is charged for all of it, and finds its memory again by the
storage object, so what `state_dict()` makes anew is allocated anew. `BlockingAsyncStager` hands out scalar DTensors
live, copies every DTensor twice, drops descriptions of local tensors, and needs an accelerator to keep its memory.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.packing import Place, pack
from megatron_fsdp.dtensor.chunks import carry_description
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError

ARENA_BYTES = 512 * 1024 * 1024
"""Of one stretch of memory; a power of two, to which torch's allocator of pinned memory rounds up."""

_Leaf = Callable[[Any], Any]


class StagingBuffers:
    """Host memory for one copy of a state, kept for the next copy.

    Attributes:
        staged_bytes: Of all tensors of the last copy, each memory counted once.
    """

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        """Without memory yet.

        Args:
            arena_bytes: Of one stretch of memory.
        """
        self.staged_bytes = 0
        self._arena_bytes = arena_bytes
        self._arenas: list[torch.Tensor] = []
        self._events: list[torch.Event] = []

    @property
    def reserved_bytes(self) -> int:
        """What the memory takes, with what alignment adds, used or not."""
        return sum(arena.nbytes for arena in self._arenas)

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Copy this rank's part of a state; what an earlier copy held is overwritten.

        Copies from a device are queued behind what the current stream of the device holds, and may not be done when
        this returns: call `wait_until_copied` before reading.

        Args:
            state: Nested dicts, lists and tuples of tensors, DTensors and objects; at the top a dict that may also hold
                what has a `state_dict()`.

        Returns:
            The same nesting, with tensors in host memory and deep copies of objects.

        Raises:
            CheckpointError: A tensor is of a kind that cannot be copied so.
        """
        if isinstance(state, dict):  # torch takes the state dicts of what stands at the top, too
            state = {key: each.state_dict() if _has_state(each) else each for key, each in state.items()}
        frozen = _mapped(state, _frozen)
        sources: dict[Any, torch.Tensor] = {}

        def collect(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                local = _local(value)
                sources.setdefault(_memory(local), local)
            return value

        _mapped(frozen, collect)
        self.staged_bytes = sum(local.nbytes for local in sources.values())
        devices = {local.device for local in sources.values() if _is_remote(local.device)}
        try:
            staged = self._copies(sources)
        finally:  # memory that a copy is under way to must not go before it has arrived
            self._events = [_recorded(device) for device in devices]
        return _mapped(frozen, lambda value: _like(value, staged) if isinstance(value, torch.Tensor) else value)

    def wait_until_copied(self) -> None:
        """Block until the last copy can be read; from any thread."""
        for event in self._events:
            event.synchronize()

    def release(self) -> None:
        """Let the memory go."""
        self.wait_until_copied()
        self._arenas = []
        self._events = []

    def _copies(self, sources: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        places, used = pack([local.nbytes for local in sources.values()], self._arena_bytes)
        self._reserve(used, pinned=any(_is_remote(local.device) for local in sources.values()))
        staged = {}
        for (key, local), place in zip(sources.items(), places, strict=True):
            staged[key] = self._buffer(place, local).copy_(local, non_blocking=_is_remote(local.device))
        return staged

    def _reserve(self, used: list[int], pinned: bool) -> None:
        """Keep the arenas that are large enough; let the others go before new ones are made."""
        fits = [
            number < len(self._arenas)
            and self._arenas[number].nbytes >= size
            and self._arenas[number].is_pinned() == pinned
            for number, size in enumerate(used)
        ]
        kept = [arena if fit else None for arena, fit in zip(self._arenas, fits, strict=False)]
        self._arenas = []
        kept += [None] * (len(used) - len(kept))
        self._arenas = [
            torch.empty(size, dtype=torch.uint8, pin_memory=pinned) if arena is None else arena
            for arena, size in zip(kept, used, strict=True)
        ]

    def _buffer(self, place: Place, like: torch.Tensor) -> torch.Tensor:
        """A tensor at a place, with a storage of just its bytes: torch clones what is a view of more to write it."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        arena = self._arenas[place.arena]
        memory = (ctypes.c_char * like.nbytes).from_address(arena.data_ptr() + place.offset)
        memory.arena = arena  # type: ignore[attr-defined]  # lives as long as a tensor over it does
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def _mapped(value: Any, leaf: _Leaf) -> Any:
    """A nesting with its leaves replaced."""
    if isinstance(value, dict):
        return {key: _mapped(each, leaf) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, leaf) for each in value)
    return leaf(value)


def _has_state(value: Any) -> bool:
    return isinstance(value, Stateful)


def _frozen(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    is_plain = type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided
    if not is_plain or local.is_meta or local.is_quantized:
        raise CheckpointError(
            f"a {type(local).__name__} ({local.layout}, on {local.device}) cannot be copied for a background save; "
            "save it in the foreground, or give a plain tensor"
        )
    return local


def _memory(local: torch.Tensor) -> Any:
    """Equal for tensors that show the same elements of the same memory."""
    if local.numel() == 0:
        return (local.dtype, tuple(local.shape))
    bits = (local.is_conj(), local.is_neg())
    return (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), bits)


def _like(tensor: torch.Tensor, staged: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """The copy of a tensor, of the same kind."""
    local = _local(tensor)
    found = staged[_memory(local)]
    if not isinstance(tensor, DTensor):
        return found
    # A view is an object of its own: several tensors of one memory may carry descriptions of their own.
    found = found.view(found.shape)
    carry_description(local, found)
    if isinstance(tensor, UnevenDTensor):
        return UnevenDTensor.wrap(found, tensor.shard_frame)
    # The constructor, since `from_local` would move the copy to the device of the mesh.
    return DTensor(found, tensor._spec, requires_grad=False)


def _is_remote(device: torch.device) -> bool:
    return device.type != "cpu"


def _recorded(device: torch.device) -> torch.Event:
    """An event behind what the current stream of a device holds."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
