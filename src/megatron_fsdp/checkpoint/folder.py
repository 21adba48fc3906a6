"""One checkpoint folder, open for reading: by one process, on the CPU, without code from it being run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp.boxes import Box
from megatron_fsdp.checkpoint.entries import ChunkEntry, ObjectEntry, Span, TensorEntry, entries_of
from megatron_fsdp.checkpoint.objects import load_object_bytes, load_tensor
from megatron_fsdp.checkpoint.restricted_pickle import load_restricted
from megatron_fsdp.errors import CheckpointError

METADATA = ".metadata"
MAX_METADATA_BYTES = 4 << 30


class CheckpointFolder:
    """A folder that torch.distributed.checkpoint (or Megatron's torch_dist) wrote.

    Opening it reads and checks the metadata only: names, shapes, that chunks cover each tensor once, that every file is
    there and long enough.

    Args:
        path: The folder with `.metadata` in it (an `iter_*` folder, not the one above).

    Attributes:
        path: The folder.

    Raises:
        CheckpointError: It is missing, not a checkpoint, incomplete or damaged; names what.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open_files: dict[str, IO[bytes]] | None = None
        self.metadata: Metadata = read_metadata(self.path)
        tensors, objects = entries_of(self.metadata, str(self.path / METADATA))
        self.tensors: dict[str, TensorEntry] = tensors
        self.objects: dict[str, ObjectEntry] = objects
        self.require_files()

    def spans(self) -> Iterator[tuple[str, Span]]:
        """Every piece of bytes, with the key it belongs to."""
        for key, tensor in self.tensors.items():
            yield from ((key, chunk.span) for chunk in tensor.chunks)
        yield from ((key, entry.span) for key, entry in self.objects.items())

    @cached_property
    def files(self) -> dict[str, int]:
        """Bytes that each file has to have at least, by name."""
        needed: dict[str, int] = {}
        for _, span in self.spans():
            needed[span.file] = max(needed.get(span.file, 0), span.offset + span.length)
        return needed

    def file_problems(self) -> list[str]:
        """Files that are missing or too short, one line each."""
        found = []
        for name, needed in sorted(self.files.items()):
            path = self.path / name
            try:
                has = path.stat().st_size if path.is_file() else None
            except OSError as error:
                found.append(f"{name} cannot be read ({error.strerror})")
                continue
            if has is None:
                found.append(f"{name} is missing")
            elif has < needed:
                found.append(f"{name} is cut off: {has} bytes of at least {needed}")
        return found

    def require_files(self) -> None:
        """Check that all files are there.

        Raises:
            CheckpointError: One is missing or too short.
        """
        problems = self.file_problems()
        if problems:
            raise CheckpointError(
                f"{self.path} is incomplete: {'; '.join(problems[:8])}; restore the files, or use another checkpoint"
            )

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def read_tensor(self, key: str) -> torch.Tensor:
        """A whole tensor.

        Raises:
            CheckpointError: There is no such tensor, or its bytes are damaged.
        """
        shape = self._tensor(key).shape
        return self.read_box(key, (0,) * len(shape), shape)

    def read_box(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """A box of a tensor; only the chunks that it meets are read.

        Args:
            key: Of the tensor.
            offsets: First index along each dimension.
            lengths: Along each dimension.

        Raises:
            CheckpointError: The box is not inside of the tensor, or as of `read_tensor`.
        """
        entry, wanted = self._tensor(key), Box(tuple(offsets), tuple(lengths))
        inside = len(wanted.offsets) == len(entry.shape) == len(wanted.lengths) and all(
            first >= 0 and length >= 0 and first + length <= total
            for first, length, total in zip(wanted.offsets, wanted.lengths, entry.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{key} of shape {entry.shape} has no box at {offsets} with lengths {lengths}")
        out: torch.Tensor | None = None
        for chunk in entry.chunks:
            there, here = _shared(chunk.box, wanted)
            if there is None or here is None:
                continue
            values = self._read(entry, chunk)[there]
            if values.shape == wanted.lengths:
                return values
            out = torch.empty(wanted.lengths, dtype=entry.dtype) if out is None else out
            out[here] = values
        return torch.empty(wanted.lengths, dtype=entry.dtype) if out is None else out

    def read_chunk(self, key: str, index: int) -> torch.Tensor:
        """The values of one chunk, shaped as its box.

        Raises:
            CheckpointError: As of `read_tensor`.
        """
        entry = self._tensor(key)
        return self._read(entry, entry.chunks[index])

    def _tensor(self, key: str) -> TensorEntry:
        found = self.tensors.get(key)
        if found is None:
            raise CheckpointError(f"{self.path} has no tensor {key}; it has {len(self.tensors)} others")
        return found

    def _read(self, entry: TensorEntry, chunk: ChunkEntry) -> torch.Tensor:
        where = f"{entry.key} at {chunk.box.offsets} in {self.path / chunk.span.file}"
        raw = self.read_span(chunk.span, chunk.transforms, where)
        values = load_tensor(io.BytesIO(raw), where)
        if tuple(values.shape) != chunk.box.lengths or values.dtype != entry.dtype:
            raise CheckpointError(
                f"{where} holds {tuple(values.shape)} of {values.dtype} where the metadata say {chunk.box.lengths} of "
                f"{entry.dtype}; the checkpoint is damaged"
            )
        return values

    # ---- objects ----------------------------------------------------------------------------------------------------

    def read_bytes(self, key: str) -> bytes:
        """The bytes of an object, as `torch.save` wrote them.

        Raises:
            CheckpointError: There is no such object, or its file cannot be read.
        """
        entry = self.objects.get(key)
        if entry is None:
            raise CheckpointError(f"{self.path} has no object {key}; it has {len(self.objects)} others")
        return self.read_span(entry.span, entry.transforms, f"{key} in {self.path / entry.span.file}")

    def read_object(self, key: str) -> object:
        """An object, read as data (see `objects.load_object`).

        Raises:
            CheckpointError: As of `read_bytes`, or it is damaged or asks for code.
        """
        return load_object_bytes(self.read_bytes(key), f"{key} in {self.path / self.objects[key].span.file}")

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Inside, a file is opened once, and closed at the end, however many spans of it are read."""
        with contextlib.ExitStack() as stack:
            self._open_files = {}
            stack.callback(setattr, self, "_open_files", None)
            stack.callback(lambda: [file.close() for file in (self._open_files or {}).values()])
            yield

    def _opened(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        if self._open_files is None:
            return (self.path / name).open("rb")
        if name not in self._open_files:
            while self._open_files:  # who reads in the order of files needs no more than one
                self._open_files.popitem()[1].close()
            self._open_files[name] = (self.path / name).open("rb")
        return contextlib.nullcontext(self._open_files[name])

    def read_span(self, span: Span, transforms: Sequence[str], where: str) -> bytes:
        """Some bytes of one file, with torch's stream extensions undone.

        Raises:
            CheckpointError: The file is missing or too short, or an extension is unknown.
        """
        try:
            with self._opened(span.file) as file:
                file.seek(span.offset)
                raw = file.read(span.length)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error
        if len(raw) != span.length:
            raise CheckpointError(f"{where} is cut off: {len(raw)} bytes of {span.length}")
        if not transforms:
            return raw
        try:
            extensions = ExtensionRegistry().from_descriptor_list(transforms)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{where} went through {list(transforms)}, which this torch cannot undo") from error
        stream: IO[bytes] = io.BytesIO(raw)
        for extension in extensions:
            stream = cast(StreamTransformExtension, extension).transform_from(stream)
        return stream.read(-1)


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a folder, unchecked inside.

    Raises:
        CheckpointError: The folder is missing or no checkpoint, or the metadata are damaged or ask for code.
    """
    path = folder / METADATA
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder of one checkpoint")
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {METADATA}, so it is not a (finished) checkpoint{_hint(folder)}")
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than any checkpoint needs; refused")
    try:
        with path.open("rb") as stream:
            return load_restricted(stream, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _hint(folder: Path) -> str:
    inside = sorted(child.name for child in folder.iterdir() if (child / METADATA).is_file())
    if inside:
        return f"; it contains some: {', '.join(inside[-4:])}: give one of these"
    if any(folder.glob("*.safetensors")):
        return "; its .safetensors files are in Hugging Face's format: use load_hf"
    return ""


def _shared(a: Box, b: Box) -> tuple[tuple[slice, ...] | None, tuple[slice, ...] | None]:
    """What two boxes share, as indices into each; None, None where they share nothing."""
    in_a, in_b = [], []
    for i, n, j, m in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True):
        first, last = max(i, j), min(i + n, j + m)
        if first >= last:
            return None, None
        in_a.append(slice(first - i, last - i))
        in_b.append(slice(first - j, last - j))
    return tuple(in_a), tuple(in_b)
