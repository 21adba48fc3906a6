"""The global plan of a save, computed by one rank from layouts that every rank knows.

torch's planner gathers a description of every box of every rank. Where all ranks hold the same tensors, cut over the
same ranks, the boxes of all ranks follow from the layouts that each of them has. So a rank sends one bit for each
tensor, set if it could write some of it, and receives one bit for each tensor, set if it has to. The first rank keeps
boxes as arrays of numbers, and writes the metadata from these arrays, tensor by tensor. Where nothing has changed since
the last save, its plan holds, and nothing of it is sent.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.checkpoint.naming import KeyPath, flatten
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.comm.collectives import real_values
from megatron_fsdp.dtensor.shard_spec import LocalChunks, no_write_items
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import ShardDescription

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of the state, as every rank knows it."""

    key: str
    path: KeyPath  # its place in the nested state
    shape: tuple[int, ...]
    properties: TensorProperties
    description: ShardDescription | None  # as the first rank has it; None: each rank holds the whole

    def __repr__(self) -> str:
        return f"{self.key} {self.path} {self.shape} {self.properties.dtype} {self.description}"


@dataclass(frozen=True)
class BitPlan(SavePlan):
    """A plan with items for objects only, and one bit for each tensor, in the order of the layouts."""

    bits: bytes = b""


@dataclass(frozen=True)
class Boxes:
    """The boxes of one tensor on all ranks; boxes with one row number are on the same ranks."""

    offsets: Integers  # (boxes, dimensions)
    lengths: Integers  # (boxes, dimensions)
    row: Integers  # (boxes,), ascending
    holders: Integers  # (rows, replicas): the ranks that hold the boxes of a row

    @functools.cached_property
    def numel(self) -> Integers:
        """Elements of each box."""
        return self.lengths.prod(axis=1)

    @functools.cached_property
    def used(self) -> Integers:
        """The rows that have boxes."""
        return self.row[self.first]

    @functools.cached_property
    def first(self) -> Integers:
        """The first box of each used row; those of a row are neighbours."""
        return np.flatnonzero(np.diff(self.row, prepend=-1))

    @functools.cached_property
    def counts(self) -> Integers:
        """The boxes of each used row."""
        return np.diff(self.first, append=len(self.row))


class Layouts:
    """All tensors of a state that has the same ones on every rank."""

    def __init__(self, tensors: Sequence[SavedTensor], num_ranks: int) -> None:
        self.tensors, self.num_ranks = tuple(tensors), num_ranks
        self.facts, self.are_as_before = b"", False  # what this rank's plan follows from; True if the last one holds
        self.keys = {tensor.key: index for index, tensor in enumerate(self.tensors)}

    @classmethod
    def agreed(
        cls, state: Mapping[str, Any], group: dist.ProcessGroup | None, last: LastPlan | None = None
    ) -> Layouts | None:
        """Return the layouts of a nested state if they are the same on every rank, else None; collective."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        digest, facts, found = None, b"", None
        try:
            leaves, paths = flatten(state)
            found = _tensors_of(leaves, paths, ranks)
        except Exception:  # noqa: BLE001 - the planner meets it as well, and all ranks raise it
            found = None
        if found is not None:
            digest = hashlib.sha256(repr(found).encode()).digest()
            facts = hashlib.sha256(digest + repr(sorted(paths.items())).encode()).digest()
        told = gather_objects((digest, last is not None and facts == last.facts), group)
        if found is None or {other for other, _ in told} != {digest}:
            return None
        layouts = cls(found, len(ranks))
        layouts.facts, layouts.are_as_before = facts, all(is_same for _, is_same in told)
        return layouts

    def bits_of(self, keys: Any) -> bytes:
        """Return a bit for each tensor, set if its key is one of these."""
        return np.packbits([key in keys for key in self.keys]).tobytes()

    def keys_of(self, bits: bytes) -> list[str]:
        """Return the keys whose bits are set."""
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.keys)).tolist()
        return [key for key, flag in zip(self.keys, flags, strict=True) if flag]

    def assign(self, bits: Sequence[bytes]) -> Assignment:
        """Choose the rank that writes each row: of those that have it, the one with the fewest bytes so far."""
        has = np.frombuffer(b"".join(bits), np.uint8).reshape(self.num_ranks, -1).T.copy()
        writes, load = np.zeros_like(has), np.zeros(self.num_ranks, np.int64)
        writers = []
        for index, tensor in enumerate(self.tensors):
            boxes = boxes_of(tensor.shape, tensor.description, self.num_ranks)
            place, bit = index // 8, np.uint8(128 >> index % 8)
            holders = boxes.holders[boxes.used]
            able = (has[place] & bit).astype(np.bool_)[holders]
            if not able.any(axis=1).all() or boxes.numel.sum() != math.prod(tensor.shape):
                raise CheckpointError(f"{tensor.key} is not whole: no rank holds some of its elements")
            cost = np.where(able, load[holders], np.iinfo(np.int64).max)
            writer = np.take_along_axis(holders, cost.argmin(axis=1)[:, None], axis=1)[:, 0]
            numel = np.add.reduceat(boxes.numel, boxes.first)
            load[writer] += np.maximum(numel * tensor.properties.dtype.itemsize, 1)
            writes[place, writer] |= bit
            writers.append(writer.astype(np.int32))
        return Assignment(self, tuple(writers), tuple(row.tobytes() for row in writes.T))


@dataclass
class LastPlan:
    """The plan of the last save that was finished, for one of the same tensors and objects."""

    facts: bytes = b""  # as of `Layouts`
    own: SavePlan | None = None  # of this rank
    metadata: PlannedMetadata | None = None  # on the first rank


def _tensors_of(
    leaves: Mapping[str, Any], paths: Mapping[str, KeyPath], ranks: Sequence[int]
) -> list[SavedTensor] | None:
    """Return the tensors of a state; None if some of them are not cut over all ranks by a layout of this library."""
    found = []
    covers: dict[int, bool] = {}  # whether a mesh has all ranks, in their order
    for key, value in leaves.items():
        if isinstance(value, UnevenDTensor):
            mesh = value.shard_spec.mesh
            if id(mesh) not in covers:
                covers[id(mesh)] = _ranks_of(mesh) == list(ranks)
            if not covers[id(mesh)]:
                return None
        if not isinstance(value, torch.Tensor):
            if hasattr(value, "__create_write_items__"):
                return None
            continue
        description = None
        if isinstance(value, UnevenDTensor) and not value.shard_spec.is_whole:
            spec, local = value.shard_spec, value._local_tensor
            chunks = getattr(getattr(local, "__create_write_items__", None), "__self__", None)
            is_ours = chunks is not None and chunks == LocalChunks.of_spec(local, spec)
            if not is_ours or spec.problem is not None:
                return None
            first = (0,) * len(spec.description.use.sizes)
            cuts = spec.description.other_cuts or (spec.description.cut,)
            description = replace(spec.description, coordinate=first, cut=cuts[0])
        elif not isinstance(value, UnevenDTensor) and (
            hasattr(value, "__tensor_flatten__")  # a DTensor of torch, too
            or value.layout is not torch.strided
            or getattr(value, "__create_write_items__", no_write_items) is not no_write_items
        ):
            return None
        shape = tuple(value.shape)
        properties = TensorProperties.create_from_tensor(getattr(value, "_local_tensor", value))
        found.append(SavedTensor(key, paths[key], shape, properties, description if math.prod(shape) else None))
    return found


@real_values()
def _ranks_of(mesh: DeviceMesh) -> list[int]:
    found: list[int] = mesh.mesh.flatten().tolist()
    return found


@functools.lru_cache(maxsize=4096)
def boxes_of(shape: tuple[int, ...], description: ShardDescription | None, num_ranks: int) -> Boxes:
    """Compute the boxes of one tensor on all ranks; once for all tensors that are cut alike."""
    everyone = np.arange(num_ranks)
    if description is None:
        whole = np.array([shape], np.int64).reshape(1, len(shape))
        return Boxes(np.zeros_like(whole), whole, np.zeros(1, np.int64), everyone[None])
    use = description.use
    is_cut = description.tensor_cut is not None and use.tensor_dim is not None
    dims = (*use.shard_dims, *([use.tensor_dim] if is_cut else []))
    others = [dim for dim in range(len(use.sizes)) if dim not in dims]
    held = list(itertools.product(range(use.num_shards), range(use.num_parts if is_cut else 1)))
    holders = everyone.reshape(use.sizes).transpose(*dims, *others).reshape(len(held), -1)
    found = [(row, box) for row, place in enumerate(held) for box in description.boxes(*place) if box.numel]
    offsets = np.array([box.offsets for _, box in found], np.int64).reshape(len(found), len(shape))
    lengths = np.array([box.lengths for _, box in found], np.int64).reshape(len(found), len(shape))
    return Boxes(offsets, lengths, np.array([row for row, _ in found], np.int64), holders)


# ---- the metadata ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The tensors that one rank wrote, in the order of its file."""

    first: int  # the byte of the file at which its tensors begin
    extra: npt.NDArray[np.unsignedinteger[Any]]  # bytes of each box besides its elements
    sums: npt.NDArray[np.uint64]  # the checksum of its part of each tensor


@dataclass(frozen=True)
class Assignment:
    """The rank that writes each box."""

    layouts: Layouts
    writers: tuple[npt.NDArray[np.int32], ...]  # of each used row of each tensor
    bits: tuple[bytes, ...]  # of each rank, the tensors that it writes

    def totals(self, written: Sequence[Written]) -> list[int]:
        """Return the checksum of each tensor."""
        at, sums = _joined([each.sums for each in written])
        found = []
        for writer in self.writers:
            found.append(int(sums[at[writer]].sum(dtype=np.uint64)))
            at[writer] += 1
        return found

    def places(
        self, boxes_of_all: Sequence[Boxes], written: Sequence[Written]
    ) -> Iterator[tuple[SavedTensor, Boxes, Integers, Integers, Integers]]:
        """Yield each tensor and its boxes, and of each box the rank that wrote it, and its bytes in the file."""
        at, extra = _joined([each.extra for each in written])
        stop, end = at[1:].copy(), np.array([each.first for each in written], np.int64)
        for tensor, boxes, writer in zip(self.layouts.tensors, boxes_of_all, self.writers, strict=True):
            spread = functools.partial(np.repeat, repeats=boxes.counts)
            index = spread(at[writer] - boxes.first) + np.arange(len(boxes.row))
            lengths = boxes.numel * tensor.properties.dtype.itemsize + extra[index]
            before = np.cumsum(lengths) - lengths
            yield tensor, boxes, spread(writer), before + spread(end[writer] - before[boxes.first]), lengths
            at[writer] += boxes.counts
            end[writer] += np.add.reduceat(lengths, boxes.first)
        if not np.array_equal(at[:-1], stop):
            raise CheckpointError("ranks wrote other tensors than was planned; save again")


def _joined(parts: Sequence[npt.NDArray[Any]]) -> tuple[Integers, npt.NDArray[Any]]:
    """Join arrays; also return where each begins, and where the last one ends."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int64), np.concatenate(parts)


class PlannedMetadata(Metadata):
    """The metadata of objects, with the assignment from which those of tensors are written; kept on the first rank."""

    assignment: Assignment

    def __reduce__(self) -> tuple[type[Metadata], tuple[dict[str, Any]]]:
        """Pickle as empty metadata, since torch sends those of a finished save to all ranks, and none reads them."""
        return Metadata, ({},)

    def dump(self, names: Sequence[str], written: Sequence[Written], stream: IO[bytes]) -> None:
        """Write all metadata to a stream as torch pickles them; `names` are the ranks' files."""
        tensors = self.assignment.layouts.tensors
        boxes = [boxes_of(each.shape, each.description, len(names)) for each in tensors]
        described: Any = {
            each.key: TensorStorageMetadata(each.properties, torch.Size(each.shape), found)  # type: ignore[arg-type]
            for each, found in zip(tensors, boxes, strict=True)
        }
        storage: Any = _Storage(self.storage_data, names, self.assignment.places(boxes, written))
        paths = {each.key: each.path for each in tensors} | (self.planner_data or {})
        whole = Metadata(described | self.state_dict_metadata, paths, storage, self.storage_meta, self.version)
        _MetadataPickler(stream).dump(whole)


@dataclass(frozen=True)
class _Storage:
    objects: Mapping[MetadataIndex, Any]
    names: Sequence[str]
    rows: Iterable[Any]  # of each tensor: it, its boxes, and their writers, offsets and lengths


class _MetadataPickler(pickle._Pickler):
    """A pickler that writes the lists of chunks and the dict of places from arrays, without an object for each box.

    Tensors that are cut alike share the list of chunks, and the places refer to its offsets. `metadata_reader` knows
    the rows by their form.
    """

    memo: dict[int, Any]
    save: Callable[[Any], None]
    write: Callable[[Any], object]
    get: Callable[[int], bytes]
    put: Callable[[int], bytes]

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, protocol=3)  # from 4 on, what is written is collected in frames
        self._count = 0  # numbers of the memo that are taken
        self._offsets: dict[int, npt.NDArray[np.uint32]] = {}  # the numbers of the offsets of boxes

    def memoize(self, obj: object) -> None:
        """Store the object that was just written in the memo of the reader."""
        self.write(self.put(self._count))
        self.memo[id(obj)] = self._count, obj
        self._count += 1

    def save_boxes(self, boxes: Boxes) -> None:
        """Write a list of `ChunkStorageMetadata`."""
        for each in (*_names.values(), torch.Size, ChunkStorageMetadata, MetadataIndex, _StorageInfo):
            self._reference(each)  # early, since small numbers take one byte
        self.write(pickle.EMPTY_LIST)
        self.memoize(boxes)
        numbers = self._offsets[id(boxes)] = np.arange(self._count, self._count + len(boxes.row), dtype="<u4")
        self._count += len(boxes.row)
        offsets = [*self._size(boxes.offsets), _column(pickle.LONG_BINPUT, numbers)]
        fields = {"offsets": offsets, "sizes": self._size(boxes.lengths)}
        self.write(pickle.MARK)
        self.write(_rows(len(boxes.row), self._object(ChunkStorageMetadata, fields)))
        self.write(pickle.APPENDS)

    def save_storage(self, found: _Storage) -> None:
        """Write a dict of `_StorageInfo` by `MetadataIndex`."""
        self.save(dict(found.objects))
        for name in found.names:
            self._reference(name)
        memo = np.array([self.memo[id(name)][0] for name in found.names], "<u4")
        for tensor, boxes, writers, offsets, lengths in found.rows:
            offset = [_column(pickle.LONG_BINGET, self._offsets[id(boxes)])]
            file = [_column(pickle.LONG_BINGET, memo[writers])]
            info = {"relative_path": file, "offset": [_integers(offsets)], "length": [_integers(lengths)]}
            row = self._object(MetadataIndex, {"fqn": [self._reference(tensor.key)], "offset": offset})
            row += self._object(_StorageInfo, info)
            self.write(pickle.MARK)
            self.write(_rows(len(writers), row))
            self.write(pickle.SETITEMS)

    def _reference(self, value: Any) -> bytes:
        """Return the operation that loads a value from the memo; write the value first if it is not there."""
        if id(value) not in self.memo:
            self.save(value)
            self.write(pickle.POP)
        return self.get(self.memo[id(value)][0])

    def _size(self, values: Integers) -> list[Any]:
        columns = [_integers(column) for column in values.T]
        return [self._reference(torch.Size), pickle.MARK, *columns, pickle.TUPLE, pickle.TUPLE1, pickle.REDUCE]

    def _object(self, kind: type, fields: Mapping[str, Sequence[Any]]) -> list[Any]:
        parts = [part for name, value in fields.items() for part in (self._reference(_names[name]), *value)]
        new = [self._reference(kind), pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.EMPTY_DICT, pickle.MARK]
        return [*new, *parts, pickle.SETITEMS, pickle.BUILD]

    dispatch: ClassVar[dict[type, Any]] = {
        **pickle._Pickler.dispatch,
        Boxes: save_boxes,
        _Storage: save_storage,
    }


_names = {name: name for name in ("offsets", "sizes", "fqn", "offset", "relative_path", "length")}
"""One object for each name, since a pickler finds written objects by their identity."""


def _integers(values: Integers) -> npt.NDArray[np.uint8]:
    """Return the operations that load integers, one a row."""
    if values.max(initial=0) < 1 << 31:
        return _column(pickle.BININT, values.astype("<i4"))
    return _column(pickle.LONG1 + b"\x08", values.astype("<i8"))


def _column(operation: bytes, arguments: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    raw = np.ascontiguousarray(arguments).view(np.uint8).reshape(len(arguments), arguments.itemsize)
    code = np.broadcast_to(np.frombuffer(operation, np.uint8), (len(arguments), len(operation)))
    return np.concatenate((code, raw), axis=1)


def _rows(count: int, parts: Sequence[bytes | npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """Join parts, each the same in every row or a column, to the bytes of all rows."""
    template = b"".join(part if isinstance(part, bytes) else bytes(part.shape[1]) for part in parts)
    rows = np.tile(np.frombuffer(template, np.uint8), (count, 1))
    place = 0
    for part in parts:
        width = len(part) if isinstance(part, bytes) else part.shape[1]
        if not isinstance(part, bytes):
            rows[:, place : place + width] = part
        place += width
    return rows
