"""Boxes of stored tensors, read by byte range: exactly the bytes that are asked for, in bounded portions."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from megatron_fsdp.checkpoint.hf.safetensors_format import StoredTensor
from megatron_fsdp.checkpoint.safe_read import only_regular
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

PORTION_BYTES = 32 * 2**20
"""The most that is held beyond the shards while reading."""


def portions(box: Box, itemsize: int, limit: int | None = None) -> Iterator[Box]:
    """A box in pieces of at most `limit` bytes (or one element), cut along its first dimensions, in order."""
    limit = PORTION_BYTES if limit is None else limit
    if box.numel * itemsize <= limit or box.numel <= 1:
        yield box
        return
    dim = next(index for index, length in enumerate(box.lengths) if length > 1)
    row_bytes = box.numel // box.lengths[dim] * itemsize
    step = max(limit // row_bytes, 1)
    for first in range(0, box.lengths[dim], step):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim] += first
        lengths[dim] = min(step, box.lengths[dim] - first)
        yield from portions(Box(tuple(offsets), tuple(lengths)), itemsize, limit)


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """The stretches of a row-major tensor's flattened elements that a box consists of: (first, count), in order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    whole = len(shape)
    while whole > 0 and box.lengths[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)  # dimensions that are walked through; those behind are one stretch
    count = math.prod(box.lengths[outer:])
    behind = sum(a * s for a, s in zip(box.offsets[outer:], strides[outer:], strict=True))
    ranges = [range(a, a + n) for a, n in zip(box.offsets[:outer], box.lengths[:outer], strict=True)]
    for place in itertools.product(*ranges):
        yield behind + sum(a * s for a, s in zip(place, strides, strict=False)), count


class FolderReader:
    """Reads boxes of the tensors of a folder; keeps the file of the latest tensor open.

    Attributes:
        folder: The folder.
        bytes_read: So far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: io.FileIO | None = None
        self.bytes_read = 0

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, tensor: StoredTensor, box: Box) -> torch.Tensor:
        """The elements of one box.

        Args:
            tensor: Which one.
            box: Inside of it.

        Returns:
            Of shape `box.lengths` and the stored dtype, on the CPU.

        Raises:
            CheckpointError: The file ends too early, or cannot be read.
        """
        itemsize = tensor.dtype.itemsize
        memory = bytearray(box.numel * itemsize)
        if not memory:
            return torch.empty(box.lengths, dtype=tensor.dtype)
        filled = 0
        with memoryview(memory) as target:
            for first, count in runs(tensor.shape, box):
                size = count * itemsize
                self._read_into(target[filled : filled + size], tensor, tensor.start + first * itemsize)
                filled += size
        return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(box.lengths)

    def _read_into(self, target: memoryview, tensor: StoredTensor, start: int) -> None:
        path = self.folder / tensor.file
        try:
            file = self._opened(path)
            file.seek(start)
            filled = 0
            while filled < len(target):
                count = file.readinto(target[filled:])
                if not count:
                    raise CheckpointError(f"{path} ended inside of tensor {tensor.key!r}; it was cut off meanwhile")
                filled += count
                self.bytes_read += count
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read at tensor {tensor.key!r}: {error}") from error

    def _opened(self, path: Path) -> io.FileIO:
        if self._file is None or self._file.name != str(path):
            self._close()
            self._file = io.FileIO(str(path), opener=only_regular)
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
