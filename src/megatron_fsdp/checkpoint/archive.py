"""The archives that `torch.save` writes (zip, nothing compressed), read out of memory with every length checked."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_fsdp.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_NEXT = (b"PK\7\x08", b"PK\3\4", b"PK\1\2")  # behind contents: their data descriptor, another record, or the directory
_PICKLE = "data.pkl"


@dataclass(frozen=True)
class Record:
    """A file in the archive.

    Attributes:
        start: First byte of its contents.
        length: In bytes.
        crc: CRC-32 of the contents; 0 where the writer was told to leave it out.
    """

    start: int
    length: int
    crc: int


class Archive:
    """One archive of `torch.save`.

    Args:
        raw: All its bytes, in memory or mapped; what is read are views of them.
        where: Names it in messages.

    Attributes:
        records: By name, without the folder that torch puts around them; no longer together than the archive.
        nbytes: Of the archive.

    Raises:
        CheckpointError: It is another kind of file, holds code, or is damaged.
    """

    def __init__(self, raw: bytearray | mmap.mmap, where: str) -> None:
        self.where = where
        self._raw = memoryview(raw)
        self.nbytes = len(self._raw)
        try:
            with zipfile.ZipFile(_Bytes(self._raw)) as found:
                infos, directory = found.infolist(), found.start_dir
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{where} is not an archive of torch.save (zip format); it is damaged, or something else ({error})"
            ) from error
        folder = next((info.filename.removesuffix(_PICKLE) for info in infos if _is_pickle(info.filename)), None)
        if folder is None:
            raise CheckpointError(f"{where} is an archive without {_PICKLE}, so torch.save did not write it")
        self.records: dict[str, Record] = {}
        for info in infos:
            name = info.filename.removeprefix(folder)
            if name == "constants.pkl":
                raise CheckpointError(
                    f"{where} holds TorchScript, which is code; a checkpoint does not need it: refused"
                )
            if name in self.records:
                raise CheckpointError(f"{where} is damaged: it has {name!a} twice")
            self.records[name] = self._record(info, directory)
        if sum(record.length for record in self.records.values()) > self.nbytes:
            raise CheckpointError(f"{where} is damaged: the files in it lie in one another")

    def _record(self, info: zipfile.ZipInfo, directory: int) -> Record:
        """Where the contents lie, by the header in front of them."""
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise CheckpointError(
                f"{self.where} is damaged: {info.filename!a} is compressed, which torch.save never does"
            )
        if not 0 <= info.header_offset <= directory - _LOCAL_HEADER.size:
            raise CheckpointError(f"{self.where} is damaged: {info.filename!a} lies outside of it")
        start = place_of_contents(info, lambda offset, count: bytes(self._raw[offset : offset + count]))
        if start is None or start + info.file_size > directory:
            raise CheckpointError(f"{self.where} is damaged: {info.filename!a} does not begin where it should")
        return Record(start, info.file_size, info.CRC)

    def read(self, name: str, *, check: bool = True) -> memoryview:
        """The contents of a record, not copied.

        Args:
            name: Without the folder.
            check: Compare with the CRC-32 that was stored.

        Raises:
            CheckpointError: There is none, or the contents have changed.
        """
        record = self.records.get(name)
        if record is None:
            raise CheckpointError(f"{self.where} is damaged: it has no {name!a:.100}")
        contents = self._raw[record.start : record.start + record.length]
        if check and record.crc and zlib.crc32(contents) != record.crc:
            raise CheckpointError(f"{self.where} is damaged: the checksum of {name!a} does not fit its contents")
        return contents

    def start_of(self, name: str) -> int:
        """First byte of a record that exists."""
        return self.records[name].start


class _Bytes(io.RawIOBase):
    """A file over bytes in memory; `io.BytesIO` would copy them."""

    def __init__(self, raw: memoryview) -> None:
        self._raw, self._place = raw, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._raw)}[whence]
        if place < 0:
            raise zipfile.BadZipFile("a place before the begin")
        self._place = place
        return place

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        found = self._raw[self._place : self._place + len(view)]
        view[: len(found)] = found
        self._place += len(found)
        return len(found)


def _is_pickle(name: str) -> bool:
    return name == _PICKLE or (name.count("/") == 1 and name.endswith(f"/{_PICKLE}"))


def place_of_contents(info: zipfile.ZipInfo, read: Callable[[int, int], bytes]) -> int | None:
    """Find where the contents of an uncompressed record begin, by the header in front of them.

    Two lengths in that header decide it, and no checksum covers them: the name behind the header, and the signature
    behind the contents, tell whether they are right.

    Args:
        info: The record, as the directory has it.
        read: (offset, count) -> that many bytes of the archive, or what there is of them.

    Returns:
        The offset; None where the header is damaged.
    """
    header = read(info.header_offset, _LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        return None
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    name_at = info.header_offset + _LOCAL_HEADER.size
    start: int = name_at + name_length + extra_length
    is_named = read(name_at, name_length) == info.orig_filename.encode()
    is_right = signature == b"PK\3\4" and is_named and read(start + info.file_size, 4) in _NEXT
    return start if is_right else None
