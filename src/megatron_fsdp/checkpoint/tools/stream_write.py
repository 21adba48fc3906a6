"""Write a folder for torch.distributed.checkpoint, with manifest, from a stream of chunks: one is in memory at a time.

(torch's own FileSystemWriter keeps every tensor of a file until the file is finished.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fsdp.checkpoint import manifest
from megatron_fsdp.checkpoint.checksum import checksum_box, combine
from megatron_fsdp.checkpoint.publish import FileOps
from megatron_fsdp.checkpoint.save import Seal, manifest_of
from megatron_fsdp.checkpoint.tools.side_files import FILES_FACT
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

FILE_BYTES = 4 << 30
CHUNK_BYTES = 256 << 20

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write.

    Attributes:
        key: Its name.
        shape: Global.
        dtype: To be written.
        boxes: Chunks; together the whole tensor, each element once.
        read: Gives the values of the chunk of a number, in that dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[Box]
    read: Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class ObjectSource:
    """An object to write.

    Attributes:
        key: Its name.
        read: Gives the bytes of one `torch.save`.
    """

    key: str
    read: Callable[[], bytes]


class _Files:
    """Numbered files of the folder; a new one is begun when one is long enough."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder, self._file_bytes = folder, file_bytes
        self._number = -1
        self._stream: IO[bytes] | None = None
        self.results: list[WriteResult] = []

    def add(self, index: MetadataIndex, write: Callable[[IO[bytes]], object]) -> None:
        """Write one piece and note where it lies."""
        if self._stream is None or self._stream.tell() >= self._file_bytes:
            self.close()
            self._number += 1
            self._stream = (self._folder / self._name).open("wb")
        start = self._stream.tell()
        write(self._stream)
        length = self._stream.tell() - start
        self.results.append(WriteResult(index, length, _StorageInfo(self._name, start, length)))

    @property
    def _name(self) -> str:
        return f"__0_{self._number}{DEFAULT_SUFFIX}"

    def close(self) -> None:
        """Bring what was written to the disk."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def drop(self) -> None:
        """Close after an error, whatever state the file is in."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()


def write_folder(
    folder: Path,
    sources: Iterable[TensorSource | ObjectSource],
    paths: Mapping[str, KeyPath] | None,
    *,
    file_bytes: int = FILE_BYTES,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write data files, files beside them, the manifest and, last, `.metadata`.

    Args:
        folder: Exists; to be published by the caller.
        sources: What to write, each key once.
        paths: Key -> path in the nested state dict (torch's `planner_data`); None where keys are not nested.
        file_bytes: A new file is begun when one is this long.
        beside: Name -> content of files that the checkpoint cannot do without; the manifest notes them.

    Raises:
        CheckpointError: The disk is full or cannot be written, or reading a source fails.
    """
    described: dict[str, STORAGE_TYPES] = {}
    files, seal = _Files(folder, file_bytes), Seal()
    try:
        for source in sources:
            if isinstance(source, ObjectSource):
                described[source.key] = _write_object(files, source, seal)
            else:
                described[source.key] = _write_tensor(files, source, seal)
        files.close()
        metadata = Metadata(described, planner_data=None if paths is None else dict(paths))
        sealed = manifest_of(metadata, [seal])
        if beside:
            for name, content in beside.items():
                (folder / name).write_bytes(content)
                FileOps().sync_file(folder / name)
            digests = {name: hashlib.sha256(content).hexdigest() for name, content in beside.items()}
            sealed = replace(sealed, facts={**sealed.facts, FILES_FACT: digests})
        FileOps().write_file(folder / manifest.FILE_NAME, sealed.to_json())
        FileSystemWriter(folder).finish(metadata, [files.results])
    except (OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} cannot be written ({error}); nothing of it is kept") from error
    finally:
        files.drop()


def _write_object(files: _Files, source: ObjectSource, seal: Seal) -> STORAGE_TYPES:
    raw = source.read()
    files.add(MetadataIndex(source.key), lambda stream: stream.write(raw))
    seal.objects[source.key] = hashlib.sha256(raw).hexdigest()
    return BytesStorageMetadata()


def _write_tensor(files: _Files, source: TensorSource, seal: Seal) -> STORAGE_TYPES:
    chunks, total = [], 0
    for number, box in enumerate(source.boxes):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.lengths)
        values = _alone(source.read(number))
        files.add(MetadataIndex(source.key, offsets, number), partial(torch.save, values))
        total = combine((total, checksum_box(values, box.offsets, source.shape)))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        del values
    seal.tensors[source.key] = total
    return TensorStorageMetadata(TensorProperties(dtype=source.dtype), torch.Size(source.shape), chunks)


def _alone(values: torch.Tensor) -> torch.Tensor:
    """Values that own exactly their memory, since a whole storage is saved."""
    values = values.detach()
    is_alone = values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes
    return values if is_alone else values.clone(memory_format=torch.contiguous_format)


def row_boxes(shape: tuple[int, ...], dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> list[Box]:
    """A tensor in chunks of whole rows of about `chunk_bytes`, so that readers need not hold it whole."""
    return list(_row_boxes(shape, dtype, chunk_bytes))


def _row_boxes(shape: tuple[int, ...], dtype: torch.dtype, chunk_bytes: int) -> Iterator[Box]:
    numel = torch.Size(shape).numel()
    if not shape or not numel:
        yield Box((0,) * len(shape), shape)
        return
    rows = max(1, chunk_bytes * shape[0] // (numel * dtype.itemsize))
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))
