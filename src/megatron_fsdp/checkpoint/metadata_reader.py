"""Read the pickle in `.metadata` as data, and its rows of boxes at once.

A checkpoint of thousands of ranks has millions of boxes. `save_plan` writes those of a tensor as rows of bytes that
differ in numbers only, so the first row tells where the numbers of all of them stand. Everything else, and the boxes
of other writers, is read operation by operation. Arrays of rows take less than twice the bytes of the rows.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_fsdp.checkpoint.safe_read import SIZE, Operations, RestrictedUnpickler, reading

Integers = npt.NDArray[np.signedinteger[Any]]
_AT_ONCE = 1 << 14  # rows that are compared with the first one


@dataclass(frozen=True, eq=False)
class Rows:
    """Numbers in a tensor's rows: of its chunks, as the only element of their list; or of their places, by its key."""

    memo: Mapping[int, Any]  # of the pickle
    offsets: Integers  # (rows, dimensions); of places (rows, 1)
    lengths: Integers
    memos: Integers  # (rows, 1), in the memo: the offsets of chunks
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

    def __init__(self, raw: bytes, where: str) -> None:
        super().__init__(raw, where)
        self.memo = _Memo()
        self._taken: list[tuple[int, int]] = []  # numbers of the memo that rows of chunks give: the first, and the end

    def load(self) -> Any:
        """Run the pickle; raise if the numbers that rows give are given again."""
        made = super().load()
        ends = np.array(sorted(self._taken), np.int64).reshape(-1, 2)
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
        first = pattern.match(self.raw, self.stream.tell())
        if first is None:
            return
        gets = [first[group] for group in range(1, pattern.groups + 1) if group not in pattern.groupindex.values()]
        meant = [self.memo.get(int.from_bytes(get[1:], "little")) for get in gets]
        if all(
            type(found) is str if thing is str else found == thing for found, thing in zip(meant, things, strict=True)
        ):
            if target is dict:
                self.append(meant[things.index(str)])
            rows = Rows(self.memo, **self._rows(first))
            if target is list:
                start = int(rows.memos[0, 0])
                self._taken.append((start, start + len(rows.memos)))
                if not np.array_equal(rows.memos[:, 0], np.arange(*self._taken[-1])):
                    raise pickle.UnpicklingError("numbers of the memo that are not counted up")
            self.append(rows)

    def _rows(self, first: re.Match[bytes]) -> dict[str, Integers]:
        """Take all rows that differ from the first one in numbers only; return the numbers of each group."""
        start, width = first.start(), first.end() - first.start()
        rows = np.frombuffer(self.raw, np.uint8, (len(self.raw) - start) // width * width, start).reshape(-1, width)
        groups = {name: list(_numbers(first, name)) for name in first.groupdict()}
        fixed = np.full(width, 0xFF, np.uint8)
        for at, end, _ in itertools.chain.from_iterable(groups.values()):
            fixed[at:end] = 0
        count, is_same = 1, True
        while is_same and count < len(rows):
            differs = ((rows[count : count + min(4 * count, _AT_ONCE)] ^ rows[0]) & fixed).any(axis=1)
            is_same = not differs.any()
            count += len(differs) if is_same else int(differs.argmax())
        self.stream.seek(start + count * width)
        none = np.empty((count, 0), np.int32)
        return {
            name: np.hstack([none, *(np.ascontiguousarray(rows[:count, at:end]).view(kind) for at, end, kind in found)])
            for name, found in groups.items()
        }

    dispatch: ClassVar[dict[int, Any]] = Operations(RestrictedUnpickler.dispatch | {pickle.MARK[0]: _mark})


def _numbers(first: re.Match[bytes], name: str) -> Iterator[tuple[int, int, str]]:
    """Yield the place in the row, and the kind, of each number of a group."""
    at, end = (place - first.start() for place in first.span(name))
    while at < end:
        before, kind = (2, "<i8") if first[0][at : at + 1] == pickle.LONG1 else (1, "<i4")
        yield at + before, at + before + int(kind[-1]), kind
        at += before + int(kind[-1])


def load_metadata(raw: bytes, where: str) -> Any:
    """Read the pickle in the `.metadata` of torch.distributed.checkpoint; Megatron's additions are kept as `Opaque`."""
    with reading(where):
        return _MetadataUnpickler(raw, where).load()
