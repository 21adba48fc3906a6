"""State that rests away from the device: its memory, and how it comes and goes.

Main weights and gradients that are away are what the optimizer sees: it steps where they rest. What is on the device
is reached by copies, on a lane of their own:

    sharded compute weights (home)  -> copied ->  their place in the full weights (device)  -> all-gathered, in place
    reduced gradient (device)       -> copied ->  main gradient (home); added to what is there on the device
    main weights (home)             -> copied, cast ->  compute weights

The host reads and writes what is away at any time, so it waits for copies: for gradients when a backward ends, for
weights when they are installed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from megatron_fsdp.config.homes import Home, Place
from megatron_fsdp.engine.buffer import FlatBuffer
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.layout import Layout
from megatron_fsdp.sharding.placement import Region


def allocate(home: Home, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros (numel,) in a home.

    Files are deleted as soon as they are mapped: their space is free again when the memory is, also after a kill.

    Args:
        home: Where.
        numel: How many elements.
        dtype: Their dtype.
        device: The device of the model; host memory is pinned for a CUDA device.

    Raises:
        ConfigurationError: The folder of a file cannot be written to, or has no room for it.
    """
    if home.place is Place.DEVICE:
        return torch.zeros(numel, dtype=dtype, device=device)
    if home.place is Place.HOST:
        return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")
    if not numel:
        return torch.zeros(0, dtype=dtype)  # nothing to map
    num_bytes = numel * dtype.itemsize
    try:
        number, path = tempfile.mkstemp(prefix="mfsdp-", suffix=".state", dir=home.folder)
        try:
            os.posix_fallocate(number, 0, num_bytes)  # a file with holes would end the process when the disk is full
            return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        finally:
            os.close(number)
            Path(path).unlink()
    except OSError as error:
        raise ConfigurationError(
            f"{num_bytes} bytes of state cannot rest in {home.folder}: {error.strerror}; free space there, or choose "
            "another home"
        ) from error


class StateMemory:
    """The optimizer state of one parameter group that is shaped as its parameters, where it rests.

    Attributes:
        is_paged: Whether a step works on copies on the device, unit by unit; else it steps where the state rests.
        was_refused: There was no room on some rank, so that all ask again in the next step.
    """

    def __init__(self, home: Home, layout: Layout, region: Region, device: torch.device, *, is_paged: bool) -> None:
        """Allocate nothing: which states there are, and their dtypes, is known after the first step."""
        self.is_paged = is_paged
        self.was_refused = False
        self._home, self._layout, self._region, self._device = home, layout, region, device
        self._buffers: dict[tuple[str, torch.dtype], FlatBuffer] = {}
        self._pieces: dict[tuple[str, int], torch.Tensor] = {}

    def has_room(self, key: str, dtype: torch.dtype) -> bool:
        """Return whether there is memory for a state already."""
        return (key, dtype) in self._buffers

    def keep(self, key: str, index: int, value: torch.Tensor) -> torch.Tensor:
        """Copy a state of parameter `index` to its place, and return that: always the same tensor for a dtype.

        Raises:
            ConfigurationError: There is no room; see `allocate`.
        """
        found = self._pieces.get((key, index))
        if found is None or found.dtype != value.dtype:
            buffer = self._buffers.get((key, value.dtype))
            if buffer is None:
                memory = allocate(self._home, self._region.numel, value.dtype, self._device)
                buffer = FlatBuffer(self._layout, self._region, value.dtype, self._device, memory)
                self._buffers[key, value.dtype] = buffer
            found = self._pieces[key, index] = buffer.piece(index)
        if found is not value:
            found.copy_(value, non_blocking=True)
        return found

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a state on the device."""
        return value.to(self._device, non_blocking=True, copy=True)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor, or a copy of it on the device where it is elsewhere, which is made when this returns."""
    return tensor if tensor.device == device else tensor.to(device)
