"""Read and write archives of `torch.save` without running code from them (see `safe_read`)."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from typing import IO, Any

import torch

from megatron_fsdp.checkpoint.safe_read import (
    ReadingBudget,
    RestrictedUnpickler,
    printable,
    reading,
)
from megatron_fsdp.errors import CheckpointError

_BLOCK_BYTES = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_BEHIND_CONTENTS = (b"PK\7\x08", b"PK\3\4", b"PK\1\2")  # their data descriptor, another record, or the directory


def write_archive(value: object, stream: IO[bytes]) -> None:
    """Call `torch.save`, and raise the stream's error (a full disk) even if torch hides it behind another."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:
        hidden = error.__context__
        if isinstance(hidden, OSError):
            raise hidden from None
        raise


def load_tensor(stream: IO[bytes], where: str, *, check: bool = False) -> torch.Tensor:
    """Read one tensor that fills the stream; `check` compares it with its CRC-32, if there is one."""
    with reading(where):
        found = _ArchiveUnpickler(_Archive(stream, where, check=check)).load()
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{where} holds a {type(found).__name__} where a tensor should be; the file is damaged")
    if found.nbytes > found.untyped_storage().nbytes():
        raise CheckpointError(f"{where} holds a tensor with fewer elements than its shape {tuple(found.shape)} has")
    return found.detach()


def place_of_elements(stream: IO[bytes], shape: tuple[int, ...], dtype: torch.dtype, where: str) -> int | None:
    """Return the offset of a tensor's elements in the stream; None if they are not stored as in memory."""
    with reading(where):
        found = _ArchiveUnpickler(_Archive(stream, where), on_meta=True).load()
        is_whole = isinstance(found, torch.Tensor) and (tuple(found.shape), found.dtype) == (shape, dtype)
        if not is_whole or not found.is_contiguous() or found.storage_offset() or found.is_conj() or found.is_neg():
            return None
    place: int | None = found.untyped_storage()._checkpoint_offset
    return place


def load_object(raw: bytes, where: str) -> Any:
    """Read one object as data, its tensors on the CPU; objects of packages such as Megatron are kept as `Opaque`."""
    with reading(where):
        return _ArchiveUnpickler(_Archive(io.BytesIO(raw), where, check=True)).load()


class _Archive:
    """The records of an archive of `torch.save`, neither compressed nor nested.

    Only Python's zip reader locates them: a second reader, such as torch's, may see other records in one file.
    """

    def __init__(self, stream: IO[bytes], where: str, *, check: bool = False) -> None:
        self.where, self._stream, self._check = where, stream, check
        self.nbytes = stream.seek(0, io.SEEK_END)
        try:
            with zipfile.ZipFile(stream) as found:
                infos, self._end = found.infolist(), found.start_dir
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{where} is not an archive of torch.save (zip format) as it was written: {printable(str(error))}; "
                "restore it from a copy, or save it again with torch.save"
            ) from error
        self._folder = infos[0].filename.partition("/")[0] if infos else ""
        self._records = {info.filename: info for info in infos}
        if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in infos):
            raise CheckpointError(f"{where} is damaged: something in it is compressed, which torch.save never does")
        if sum(info.file_size for info in infos) > self.nbytes or len(self._records) < len(infos):
            raise CheckpointError(f"{where} is damaged: the files in it lie in one another")
        if "constants.pkl" in self:
            raise CheckpointError(f"{where} holds TorchScript, which is code; a checkpoint does not need it: refused")

    def __contains__(self, name: str) -> bool:
        return f"{self._folder}/{name}" in self._records

    def place_of(self, name: str) -> tuple[int, int]:
        """Return the first byte of a record, and its length.

        Both follow from two lengths in a header without a checksum; the name in front and the signature behind confirm
        them.
        """
        info = self._records.get(f"{self._folder}/{name}")
        if info is None:
            raise CheckpointError(f"{self.where} is damaged: it has no {name!a:.100}")
        self._stream.seek(info.header_offset)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(self._stream.read(_LOCAL_HEADER.size))
        is_right = signature == b"PK\3\4" and self._stream.read(name_length) == info.orig_filename.encode()
        start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        self._stream.seek(start + info.file_size)
        if not is_right or start + info.file_size > self._end or self._stream.read(4) not in _BEHIND_CONTENTS:
            raise CheckpointError(f"{self.where} is damaged: {name!a:.100} does not begin where it should")
        return start, info.file_size

    def read(self, name: str) -> torch.Tensor:
        """Read the bytes of a record, and compare them with their CRC-32 if requested and present."""
        start, length = self.place_of(name)
        self._stream.seek(start)
        contents = torch.empty(length, dtype=torch.uint8)
        view = contents.numpy().data
        has = self._stream.readinto(view)  # type: ignore[attr-defined]
        crc = self._records[f"{self._folder}/{name}"].CRC
        if has != length or (self._check and crc and zlib.crc32(view) != crc):
            raise CheckpointError(f"{self.where} is damaged: the checksum of {name!a:.100} does not fit its contents")
        return contents


class _ArchiveUnpickler(RestrictedUnpickler):
    """Reads the pickle of an archive; its storages are read, or (`on_meta`) created without memory."""

    def __init__(self, archive: _Archive, *, on_meta: bool = False) -> None:
        super().__init__(io.BytesIO(archive.read("data.pkl").numpy().tobytes()), archive.where)
        self._archive, self._on_meta = archive, on_meta
        order = archive.read("byteorder").numpy().tobytes() if "byteorder" in archive else b"little"
        if order not in (b"little", b"big"):
            raise CheckpointError(f"{self.where} is damaged: byte order {order!r:.50}")
        self._swapped = order.decode() != sys.byteorder
        self._storages: dict[tuple[str, torch.dtype], torch.storage.TypedStorage] = {}
        self._views = ReadingBudget(archive.nbytes + _BLOCK_BYTES, self.where)

    def persistent_load(self, pid: Any, /) -> torch.storage.TypedStorage:
        """Return the storage that the pickle describes."""
        if not (type(pid) is tuple and [type(part) for part in pid] == [str, torch.dtype, str, str, int]):
            raise CheckpointError(f"{self.where} refers to something outside of itself that is no storage; refused")
        _, dtype, key, _, numel = pid
        start, length = self._archive.place_of(f"data/{key}")
        if numel * dtype.itemsize != length:
            raise CheckpointError(
                f"{self.where} is damaged: {key!a:.100} has {length} bytes, not {numel!s:.30} elements of {dtype}"
            )
        if (key, dtype) not in self._storages:
            storage = self._storage(key, dtype, start, length)
            self._storages[key, dtype] = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        return self._storages[key, dtype]

    def _storage(self, key: str, dtype: torch.dtype, start: int, length: int) -> torch.UntypedStorage:
        if self._on_meta:
            storage = torch.UntypedStorage(length, device="meta")
            storage._checkpoint_offset = None if self._swapped else start
            return storage
        storage = self._archive.read(f"data/{key}").untyped_storage()
        if self._swapped:
            storage.byteswap(dtype)
        return storage

    def _call(self) -> None:
        super()._call()
        if isinstance(self.stack[-1], torch.Tensor):
            self._views.spend(self.stack[-1].nbytes)
