"""Write a tensor as `torch.save` does, byte for byte, for less: most tensors of a model are small and of few shapes.

`torch.save` makes a class for every call and pickles the description of the tensor anew; that is most of what saving a
model of many small tensors costs. Here the description is pickled once for each dtype and shape. A view is written from
where it lies, without a copy.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import IO, Any

import torch
from torch import nn, serialization

_Kind = tuple[torch.dtype, torch.Size]


class TensorArchives:
    """Writes archives of single tensors; keeps the description of each dtype and shape that it has seen."""

    def __init__(self) -> None:
        """With nothing seen yet."""
        self._described: dict[_Kind, bytes] = {}

    def write(self, tensor: torch.Tensor, stream: IO[bytes]) -> None:
        """Append one archive to a stream.

        Args:
            tensor: On any device; what is not on the CPU or not contiguous is copied for the time of the call.
            stream: Open for writing, buffered.

        Raises:
            OSError: Of the stream, such as that the disk is full.
        """
        watched = _WatchedStream(stream)
        try:
            self._write(tensor, watched)  # type: ignore[arg-type]  # torch only writes
        except RuntimeError:
            if watched.error is None:
                raise
            raise watched.error from None

    def _write(self, tensor: torch.Tensor, stream: IO[bytes]) -> None:
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_quantized:
            torch.save(tensor, stream)
            return
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        described = self._described.get((tensor.dtype, tensor.shape))
        if described is None:
            described = self._described[tensor.dtype, tensor.shape] = _described(tensor)
        with serialization._open_zipfile_writer(stream) as archive:
            archive.write_record("data.pkl", described, len(described))
            archive.write_record(".format_version", "1", 1)
            alignment = str(serialization._get_storage_alignment())
            archive.write_record(".storage_alignment", alignment, len(alignment))
            archive.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            archive.write_record("data/0", _elements(tensor), tensor.nbytes)


class _WatchedStream:
    """A stream that remembers its error: torch's writer reports a wrong position in its place."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """As the stream's."""
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """As the stream's."""
        self._stream.flush()


def _elements(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of just these elements, in the memory of the tensor."""
    storage = tensor.untyped_storage()
    first = tensor.storage_offset() * tensor.element_size()
    if first == 0 and storage.nbytes() == tensor.nbytes:
        return storage
    return storage[first : first + tensor.nbytes]


class _Pickler(pickle.Pickler):
    """Refers to a storage as `torch.save` does to the only one of an archive, of as many elements as the tensor has."""

    def __init__(self, stream: IO[bytes], numel: int, nbytes: int) -> None:
        super().__init__(stream, protocol=serialization.DEFAULT_PROTOCOL)
        self._numel = numel
        self._nbytes = nbytes

    def persistent_id(self, value: Any) -> Any:
        """How a storage is named; None for what is pickled as it is."""
        if isinstance(value, torch.storage.TypedStorage):
            return "storage", getattr(torch, value._pickle_storage_type()), "0", "cpu", self._numel
        if torch.is_storage(value):
            return "storage", torch.UntypedStorage, "0", "cpu", self._nbytes
        return None


def _described(tensor: torch.Tensor) -> bytes:
    """The description of a contiguous tensor that has a storage to itself."""
    stream = io.BytesIO()
    alone = torch.empty(0, dtype=tensor.dtype).set_(_elements(tensor), 0, tensor.shape)  # type: ignore[call-overload]
    _Pickler(stream, tensor.numel(), tensor.nbytes).dump(alone)
    return stream.getvalue()
