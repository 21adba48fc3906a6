"""Archives of `torch.save` that are written to a full disk."""

from __future__ import annotations

import io

import pytest
import torch

from megatron_fsdp.checkpoint.archive import load_tensor, write_archive


class FullDisk(io.BytesIO):
    """A file that can grow to so many bytes and no further."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: object, /) -> int:
        if self.tell() + memoryview(data).nbytes > self._room:  # type: ignore[arg-type]
            raise OSError(28, "No space left on device")
        return super().write(data)  # type: ignore[arg-type]


def test_a_full_disk_is_told_wherever_the_archive_stops() -> None:
    values = torch.arange(300.0)
    whole = io.BytesIO()
    torch.save(values, whole)
    size = whole.tell()
    for room in range(0, size, 20):
        with pytest.raises(OSError, match="No space left on device"):
            write_archive(values, FullDisk(room))
    fits = FullDisk(size)
    write_archive(values, fits)
    assert torch.equal(load_tensor(fits, "a file"), values)
