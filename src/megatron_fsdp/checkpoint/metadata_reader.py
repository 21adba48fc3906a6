"""Read the pickle in `.metadata` as data, and its rows of boxes at once.

A checkpoint of thousands of ranks has millions of boxes. `save_plan` writes those of a tensor as rows of bytes that
differ in numbers only, so the first row tells where the numbers of all of them stand. Everything else, and the boxes
of other writers, is read operation by operation. The file is read piece by piece: neither held in memory, nor mapped,
since what reads a mapped file that another process cuts off is killed.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_fsdp.checkpoint.safe_read import SIZE, Operations, RestrictedUnpickler, reading

Integers = npt.NDArray[np.signedinteger[Any]]
_AT_ONCE = 1 << 14  # rows that are read and compared with the first one
_LONGEST = 1 << 11  # bytes of a row; those of 64 dimensions, torch's limit, have fewer


@dataclass(frozen=True, eq=False)
class Rows:
    """Numbers in a tensor's rows: of its chunks, as the only element of their list; or of their places, by its key."""

    memo: Mapping[int, Any]  # of the pickle
    start: int  # in the memo: the offsets of the first chunk, which those of the others follow
    offsets: Integers  # (rows, dimensions); of places (rows, 1)
    lengths: Integers
    files: Any = None  # of places (rows, 1), in the memo: the names of files


def _pattern(*parts: Any) -> tuple[re.Pattern[bytes], list[Any]]:
    """Return the pattern of a row; parts that are not bytes are references to the memo, which are returned, too."""
    pattern = b"".join(part if type(part) is bytes else rb"(h.|j.{4})" for part in parts)
    return re.compile(pattern, re.DOTALL), [part for part in parts if type(part) is not bytes]


_NEW, _NUMBER = rb"\)\x81\}\(", rb"(?:J.{4}|\x8a\x08.{8})"
_OFFSETS, _LENGTHS = rb"\((?P<offsets>%b*)t\x85R" % _NUMBER, rb"\((?P<lengths>%b*)t\x85R" % _NUMBER
_CHUNK = _pattern(
    *(ChunkStorageMetadata, _NEW, "offsets", SIZE, _OFFSETS, rb"(?P<memos>r.{4})", "sizes", SIZE, _LENGTHS, rb"ub")
)
_PLACE = _pattern(
    *(MetadataIndex, _NEW, "fqn", str, "offset", rb"(?P<memos>j.{4})ub"),
    *(_StorageInfo, _NEW, "relative_path", rb"(?P<files>j.{4})"),
    *("offset", rb"(?P<offsets>%b)" % _NUMBER, "length", rb"(?P<lengths>%b)ub" % _NUMBER),
)


class _Memo(dict[int, Any]):
    """The memo of a pickle, in which a number is given once, since rows are looked up at the end."""

    def __setitem__(self, number: int, made: Any) -> None:
        if number in self:
            raise pickle.UnpicklingError(f"two things have the number {number} of the memo")
        super().__setitem__(number, made)


class _MetadataUnpickler(RestrictedUnpickler):
    """The unpickler of metadata."""

    memo: dict[int, Any]

    def __init__(self, stream: BinaryIO, where: str) -> None:
        super().__init__(stream, where)
        self.memo = _Memo()
        self._taken: dict[int, int] = {}  # numbers of the memo that rows of chunks give: how many, by the first

    def load(self) -> Any:
        """Run the pickle; raise if the numbers that rows give are given again."""
        made = super().load()
        ends = np.array(sorted(self._taken.items()), np.int64).reshape(-1, 2).cumsum(axis=1)
        numbers = np.fromiter(self.memo, np.int64, len(self.memo))
        before = np.searchsorted(ends[:, 0], numbers, side="right") - 1
        if (ends[1:, 0] < ends[:-1, 1]).any() or (len(ends) and (numbers < ends[before, 1])[before >= 0].any()):
            raise pickle.UnpicklingError("boxes share a number of the memo")
        return made

    def _mark(self) -> None:
        """Begin the elements of a list, or the items of a dict; rows of them are taken at once."""
        target = type(self.stack[-1]) if self.stack else None
        pickle._Unpickler.load_mark(self)  # type: ignore[attr-defined]
        if target not in (list, dict):
            return
        pattern, things = _CHUNK if target is list else _PLACE
        at = self.stream.tell()
        first = pattern.match(self.stream.read(_LONGEST))
        self.stream.seek(at)
        if first is None:
            return
        gets = [first[group] for group in range(1, pattern.groups + 1) if group not in pattern.groupindex.values()]
        meant = [self.memo.get(int.from_bytes(get[1:], "little")) for get in gets]
        start = int.from_bytes(first["memos"][1:], "little")
        count = self._taken.get(start)  # of places as of chunks, which come first
        if (count is None) == (target is list) and all(
            type(found) is str if thing is str else found == thing for found, thing in zip(meant, things, strict=True)
        ):
            if target is dict:
                self.append(meant[things.index(str)])
            numbers = self._rows(first, count)
            memos = numbers.pop("memos")[:, 0]
            self._taken[start] = count or len(memos)
            if not np.array_equal(memos, np.arange(start, start + self._taken[start])):
                raise pickle.UnpicklingError("numbers of the memo that are not counted up")
            self.append(Rows(self.memo, start, **numbers))

    def _rows(self, first: re.Match[bytes], count: int | None) -> dict[str, Integers]:
        """Take rows that differ from the first in numbers only, all or `count`; return the numbers of each group."""
        places = {name: list(_numbers(first, name)) for name in first.groupdict()}
        fixed = bytearray(first[0])
        found: dict[int, list[Integers]] = {}
        for at, end, kind in itertools.chain.from_iterable(places.values()):
            fixed[at:end], found[at] = bytes(end - at), [np.empty(0, kind)]
        width, begin, taken, is_same = len(fixed), self.stream.tell(), 0, True
        while is_same and taken != count:
            most = 4 * taken + 8 if count is None else count - taken
            raw = bytearray(self.stream.read(width * min(most, _AT_ONCE)))
            rows = np.ndarray((len(raw) // width, width), np.uint8, raw)
            for at, end, kind in itertools.chain.from_iterable(places.values()):
                column = rows[:, at:end].view(kind)[:, 0]
                found[at].append(column.copy())
                column[:] = 0
            same = len(rows)
            if rows.tobytes() != fixed * same:
                same = int((rows != np.frombuffer(fixed, np.uint8)).any(axis=1).argmax())
            is_same = 0 < same == len(rows)
            taken += same
        self.stream.seek(begin + taken * width)
        none = np.empty((taken, 0), np.int32)
        return {
            name: np.hstack([none, *(np.concatenate(found[at])[:taken, None] for at, _, _ in of_name)])
            for name, of_name in places.items()
        }

    dispatch: ClassVar[dict[int, Any]] = Operations(RestrictedUnpickler.dispatch | {pickle.MARK[0]: _mark})


def _numbers(first: re.Match[bytes], name: str) -> Iterator[tuple[int, int, str]]:
    """Yield the place in the row, and the kind, of each number of a group."""
    at, end = first.span(name)
    while at < end:
        before, kind = (2, "<i8") if first[0][at : at + 1] == pickle.LONG1 else (1, "<i4")
        yield at + before, at + before + int(kind[-1]), kind
        at += before + int(kind[-1])


def load_metadata(stream: BinaryIO, where: str) -> Any:
    """Read the pickle in the `.metadata` of torch.distributed.checkpoint; Megatron's additions are kept as `Opaque`."""
    with reading(where):
        return _MetadataUnpickler(stream, where).load()
