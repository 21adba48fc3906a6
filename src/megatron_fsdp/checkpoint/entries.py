"""What a checkpoint consists of, as plain data, checked against itself. Pure."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_fsdp.checkpoint.flat_state import is_key
from megatron_fsdp.checkpoint.reading_budget import ELEMENT_BYTES, MAX_DEPTH, MAX_DIMS, ReadingBudget
from megatron_fsdp.checkpoint.restricted_pickle import printable
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

_TOO_MANY = 1 << 62
_MAX_NAME_BYTES = 255
_MAX_KEY_LENGTH = 4096
_MAX_TRANSFORMS = 8
_MAX_LIST_ITEMS = 1 << 20  # torch makes a list as long as the largest index in a path
_PRIME = (1 << 61) - 1


@dataclass(frozen=True)
class Span:
    """Consecutive bytes of one file of the folder.

    Attributes:
        file: Name inside the folder.
        offset: First byte.
        length: In bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ChunkEntry:
    """A box of a tensor, and where its bytes are.

    Attributes:
        box: In global coordinates.
        span: Bytes of one `torch.save`.
        transforms: Names of torch's stream extensions that the bytes went through.
    """

    box: Box
    span: Span
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorEntry:
    """One global tensor.

    Attributes:
        key: Its name.
        shape: Global.
        dtype: Of the elements.
        chunks: Boxes that cover it, none twice.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkEntry, ...]

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class ObjectEntry:
    """One object that is no tensor.

    Attributes:
        key: Its name.
        span: Bytes of one `torch.save`.
    """

    key: str
    span: Span
    transforms: tuple[str, ...] = ()


def entries_of(
    metadata: object, where: str, budget: ReadingBudget
) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
    """The tensors and objects that metadata describe, in the order of their names.

    Args:
        metadata: A `Metadata` as read; of its insides nothing is believed before it is checked.
        where: Names the checkpoint in messages.
        budget: Of the file; chunks are counted, of which many tensors may share one list.

    Raises:
        CheckpointError: Something is not what it should be: names the key.
        OverBudgetError: There is more of it than the file is long.
    """
    described: Any = getattr(metadata, "state_dict_metadata", None)
    storage: Any = getattr(metadata, "storage_data", None)
    if not (isinstance(described, dict) and isinstance(storage, dict)):
        raise CheckpointError(f"{where} is not the metadata of torch.distributed.checkpoint; give a folder it wrote")
    tensors, objects = {}, {}
    odd = next((type(key).__name__ for key in described if not isinstance(key, str)), None)
    if odd is not None:
        raise CheckpointError(f"{where} has a key that is not text but {odd}")
    for key in sorted(described):
        found = described[key]
        if not is_key(key):
            raise CheckpointError(f"{where} has a key with control characters: {key!a:.200}")
        if len(key) > _MAX_KEY_LENGTH or key.count(".") > MAX_DEPTH:
            raise CheckpointError(
                f"{where} has a key of {len(key)} characters and {key.count('.')} dots, {key:.100}...; at most "
                f"{_MAX_KEY_LENGTH} and {MAX_DEPTH} are read"
            )
        if isinstance(found, TensorStorageMetadata):
            tensors[key] = _tensor_entry(key, found, storage, where, budget)
        elif isinstance(found, BytesStorageMetadata):
            objects[key] = ObjectEntry(key, *_span(storage, MetadataIndex(key), where))
        else:
            raise CheckpointError(f"{where}: {key} is neither a tensor nor an object but {type(found).__name__}")
    return tensors, objects


def _tensor_entry(
    key: str, found: TensorStorageMetadata, storage: Mapping[MetadataIndex, Any], where: str, budget: ReadingBudget
) -> TensorEntry:
    shape, dtype = _sizes(found.size, key, where), getattr(found.properties, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where}: {key} has no dtype")
    chunks = []
    for chunk in found.chunks:
        box = Box(_sizes(chunk.offsets, key, where), _sizes(chunk.sizes, key, where))
        entry = ChunkEntry(box, *_span(storage, MetadataIndex(key, box.offsets), where))
        beyond = 0 if entry.transforms else max(0, box.numel * dtype.itemsize - entry.span.length)
        budget.spend((8 + len(shape)) * ELEMENT_BYTES + beyond)
        chunks.append(entry)
    if math.prod(shape) >= _TOO_MANY:
        raise CheckpointError(f"{where}: {key} has {len(shape)} dimensions and more elements than any tensor has")
    problem = cover_problem(shape, [chunk.box for chunk in chunks])
    if problem is not None:
        raise CheckpointError(f"{where}: {key} of shape {shape} {problem}")
    return TensorEntry(key, shape, dtype, tuple(chunks))


def _sizes(value: Any, key: str, where: str) -> tuple[int, ...]:
    is_shape = isinstance(value, tuple | list) and len(value) <= MAX_DIMS
    if is_shape and all(type(n) is int and 0 <= n < _TOO_MANY for n in value):
        return tuple(value)
    raise CheckpointError(f"{where}: {printable(key)} has something else where lengths should stand")


def _span(storage: Mapping[MetadataIndex, Any], index: MetadataIndex, where: str) -> tuple[Span, tuple[str, ...]]:
    found = storage.get(index)
    if found is None and not any(index.offset or ()):
        found = storage.get(MetadataIndex(index.fqn))  # some writers leave out the offsets of whole tensors
    if found is None:
        raise CheckpointError(
            f"{where}: {index.fqn} is listed but nothing says where its bytes are (at {index.offset})"
        )
    name = getattr(found, "relative_path", None)
    numbers = (getattr(found, "offset", None), getattr(found, "length", None))
    if not is_plain_name(name):
        shown = ascii(name)[:200] if isinstance(name, str) else type(name).__name__
        raise CheckpointError(f"{where}: {index.fqn} points to {shown}, which is not a file of the folder; refused")
    offset, length = _sizes(numbers, index.fqn, where)
    transforms = getattr(found, "transform_descriptors", None) or ()
    if len(transforms) > _MAX_TRANSFORMS or not all(isinstance(transform, str) for transform in transforms):
        raise CheckpointError(f"{where}: {index.fqn} went through something else than a few named transforms")
    return Span(str(name), offset, length), tuple(transforms)


def check_paths(metadata: object, where: str, budget: ReadingBudget) -> None:
    """Check how keys nest, where metadata say it.

    Raises:
        CheckpointError: A key has no path of names and small numbers.
        OverBudgetError: As of `count_lists`.
    """
    found: Any = getattr(metadata, "planner_data", None)
    paths = found if isinstance(found, dict) else {}
    for key, path in paths.items():
        if not (isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH and all(map(_is_step, path))):
            raise CheckpointError(f"{where} says of {key!a:.200} that it nests in something that is no path")
    count_lists(paths.values(), budget)


def count_lists(paths: Iterable[tuple[Any, ...]], budget: ReadingBudget) -> None:
    """Count the lists that numbers in paths stand for: each is as long as its largest index.

    Raises:
        OverBudgetError: They are too long together.
    """
    lengths: dict[tuple[Any, ...], int] = {}
    for path in paths:
        for place, step in enumerate(path):
            if type(step) is int and step >= (known := lengths.get(path[:place], 0)):
                lengths[path[:place]] = step + 1
                budget.spend(ELEMENT_BYTES * (step + 1 - known))


def _is_step(step: object) -> bool:
    return type(step) is str or (type(step) is int and 0 <= step < _MAX_LIST_ITEMS)


def is_plain_name(name: object) -> bool:
    """Whether it names a file of a folder, and nothing outside of it."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name or len(name.encode()) > _MAX_NAME_BYTES:
        return False
    return PurePosixPath(name).name == name and name not in ("", "..")


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should hold each element of a tensor once, in words; None if nothing is."""
    for box in boxes:
        if len(box.offsets) != len(shape) or any(
            offset + length > total for offset, length, total in zip(box.offsets, box.lengths, shape, strict=True)
        ):
            return f"has a chunk outside of it, at {box.offsets} with lengths {box.lengths}"
    filled = [box for box in boxes if box.numel]
    total = sum(box.numel for box in filled)
    if total != math.prod(shape):
        state = "is incomplete" if total < math.prod(shape) else "has elements more than once"
        return f"{state}: its chunks hold {total} elements of {math.prod(shape)}"
    return None if _is_tiled(shape, filled) else "has elements more than once"


def _is_tiled(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes inside of a tensor hold each element once, in time linear in their number.

    Their volumes are added up, with the distance of two places along a dimension drawn at random instead of counted:
    that of the whole tensor comes out where each element is in one box, and else with odds of about 2^-55.
    """
    salt = secrets.randbits(60)

    def volume(offsets: Sequence[int], lengths: Sequence[int]) -> int:
        product = 1
        for dim, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
            product = product * (hash((salt, dim, first + length)) - hash((salt, dim, first))) % _PRIME
        return product

    return sum(volume(box.offsets, box.lengths) for box in boxes) % _PRIME == volume([0] * len(shape), shape)
