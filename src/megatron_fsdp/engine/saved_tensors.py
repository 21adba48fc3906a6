"""Saved activations away from the device: what autograd saves in a unit's forward leaves after it, and is back in time.

    forward of unit k    tensors are noted as autograd saves them
        its end          each storage is copied home, once, on the lane of all that goes
    end of unit k + 1    the copies of unit k are waited for, and its storages are dropped
    backward of unit k   its storages are copied back, and already those of the unit that was called before it, on the
                         lane of all that comes

Weights stay, since they are held anyway. So does what is saved under hooks of somebody else, such as those
of activation checkpointing, which computes it again. Bits, strides and offsets are those of the resident run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_fsdp.comm.lanes import Lane, Ticket
from megatron_fsdp.config.homes import Home
from megatron_fsdp.engine.memory import allocate, storage_of

_SMALLEST_BYTES = 1024
"""Bytes of the smallest storage that leaves: a copy of less costs more than its memory."""


class _Content:
    """The bytes of one storage: in their home, and on the device until they have left and when they are back."""

    def __init__(self, on_device: Tensor, away: Tensor, going: Lane, coming: Lane) -> None:
        self._device = on_device.device
        self._coming = coming
        self.on_device: Tensor | None = on_device
        self.away = away
        self.ticket = _copy(going, on_device, away)

    def drop(self) -> None:
        """Free the memory on the device, once the copy is made."""
        self.ticket.wait()
        self.on_device = None

    def fetch(self) -> Tensor:
        """Return the bytes on the device; where they are away, start to copy them back: wait on the ticket."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.away, device=self._device, pin_memory=False)
            self.ticket = _copy(self._coming, self.away, self.on_device)
        return self.on_device


def _copy(lane: Lane, source: Tensor, target: Tensor) -> Ticket:
    def copy(_async_op: bool) -> None:
        target.copy_(source, non_blocking=True)

    return lane.submit(copy)


class _Saved:
    """One tensor that autograd has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # shares memory and version counter, not the graph
        self._version = tensor._version
        self._content: _Content | None = None

    def leave(self, content: _Content) -> None:
        """Refer to the bytes of the storage, which were just copied, in place of the tensor's memory."""
        tensor = self.tensor
        self._lies = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()
        self._content = content
        tensor.data = tensor.new_empty(0)  # the version counter stays the one that is shared with the graph's tensor

    def fetch(self) -> None:
        """Start to bring the bytes back, where they are away."""
        if self._content is not None:
            self._content.fetch()

    def restore(self) -> Tensor:
        """Return the tensor for backward; refuse, as autograd does, one modified in place after it was saved."""
        if self.tensor._version != self._version:
            dtype, _, shape, _ = self._lies if self._content else (self.tensor.dtype, 0, self.tensor.shape, ())
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"saved tensor of {dtype} {tuple(shape)} was changed after autograd had saved it"
            )
        if self._content is None:
            return self.tensor
        found = self._content.fetch()
        self._content.ticket.wait()
        dtype, *lies = self._lies
        restored = found.new_empty(0, dtype=dtype).set_(found.untyped_storage(), *lies)
        restored = restored.conj() if self._is_conj else restored
        return torch._neg_view(restored) if self._is_neg else restored


class UnitTensors:
    """What autograd saved in one forward of a unit; the graph owns it."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.hooks: saved_tensors_hooks | None = None
        self._saved: list[weakref.ref[_Saved]] = []

    def note(self, tensor: Tensor) -> _Saved:
        """Note a tensor that autograd saves."""
        made = _Saved(tensor)
        self._saved.append(weakref.ref(made))
        return made

    def alive(self) -> list[_Saved]:
        """Return what some graph still holds."""
        return [saved for reference in self._saved if (saved := reference()) is not None]


class SavedTensors:
    """Moves the saved tensors of a model's units between the device and their home.

    Copies to the home run on `going`, those to the device on `coming`; `is_held` says whether the memory of a storage,
    by the number of `storage_of`, is held anyway.
    """

    def __init__(
        self, home: Home, device: torch.device, going: Lane, coming: Lane, is_held: Callable[[int], bool]
    ) -> None:
        self._home, self._device, self._is_held = home, device, is_held
        self._lanes = going, coming
        self._running: list[UnitTensors] = []
        self._leaving: list[_Content] = []
        self._called: list[weakref.ref[UnitTensors]] = []
        self._bytes_away: weakref.WeakKeyDictionary[_Content, int] = weakref.WeakKeyDictionary()

    @property
    def held_bytes(self) -> int:
        """Bytes that rest in the home now."""
        return sum(self._bytes_away.values())

    def begin(self, unit: int) -> None:
        """Note what autograd saves from here on: the forward of a unit begins."""
        made = UnitTensors(unit)
        self._running.append(made)
        found: tuple[object, object] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if found is None or found[1] is _unpack:  # else, as in a checkpoint around a unit in a unit, they are not ours
            made.hooks = saved_tensors_hooks(made.note, _unpack)
            made.hooks.__enter__()

    def end(self, unit: int, goes: bool) -> UnitTensors | None:
        """Send away what was saved: the forward of a unit has ended; return it where there is something.

        Nothing leaves unless it `goes`: unless it will be needed in a backward.
        """
        if not self._running or self._running[-1].unit != unit:
            return None  # its forward did not begin
        made = self._running.pop()
        if made.hooks is None:
            return None
        made.hooks.__exit__()
        made.hooks = None
        self._drop_left()
        if goes:
            self._send(made.alive())
            self._called.append(weakref.ref(made))
        return made

    def fetch(self, made: UnitTensors) -> None:
        """Bring back what was saved in one forward, whose backward begins, and in the forward before it."""
        self._drop_left()
        self._called = [reference for reference in self._called if reference() is not None]
        numbers = [number for number, reference in enumerate(self._called) if reference() is made]
        for number in numbers:
            for reference in self._called[max(0, number - 1) : number + 1][::-1]:
                found = reference()
                for saved in found.alive() if found is not None else ():
                    saved.fetch()
            del self._called[number:]

    def reset(self) -> None:
        """Forget forwards that have not ended, after an exception."""
        while self._running:
            hooks = self._running.pop().hooks
            if hooks is not None:
                hooks.__exit__()
        self._drop_left()

    def _drop_left(self) -> None:
        for content in self._leaving:
            content.drop()
        self._leaving.clear()

    def _send(self, saved: Iterable[_Saved]) -> None:
        contents: dict[int, _Content] = {}
        held = self.held_bytes
        for each in saved:
            tensor = each.tensor
            number = self._storage_that_leaves(tensor)
            if number is None:
                continue
            if number not in contents:
                num_bytes = tensor.untyped_storage().nbytes()
                if self._home.limit_bytes is not None and held + num_bytes > self._home.limit_bytes:
                    continue
                held += num_bytes
                contents[number] = self._send_storage(tensor)
            each.leave(contents[number])
        self._leaving.extend(contents.values())

    def _storage_that_leaves(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None where it stays."""
        if type(tensor) is not Tensor or tensor.device != self._device:
            return None
        number = storage_of(tensor)
        if number is None or self._is_held(number) or tensor.untyped_storage().nbytes() < _SMALLEST_BYTES:
            return None
        return number

    def _send_storage(self, tensor: Tensor) -> _Content:
        source = tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        content = _Content(source, allocate(self._home, source.numel(), torch.uint8, self._device), *self._lanes)
        self._bytes_away[content] = source.numel()
        return content


def _unpack(saved: object) -> Tensor:
    assert isinstance(saved, _Saved)
    return saved.restore()
