"""Two checkpoints against each other; one chunk of each side is in memory at a time, however each is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_fsdp.checkpoint.folder import CheckpointFolder, ObjectEntry, TensorEntry
from megatron_fsdp.checkpoint.tools.common_state import as_json, dtype_name, read_common_file
from megatron_fsdp.checkpoint.tools.compare_objects import first_difference
from megatron_fsdp.checkpoint.tools.compare_values import Tolerance, ValueDifference, compare_piece, merge
from megatron_fsdp.checkpoint.tools.inspect import compiled, natural_order
from megatron_fsdp.checkpoint.tools.kinds import COMMON_FILE
from megatron_fsdp.checkpoint.tools.pieces import Piece
from megatron_fsdp.sharding.shards import Box

Entry = TensorEntry | ObjectEntry | None


@dataclass(frozen=True)
class Difference:
    """What differs about one key.

    Attributes:
        key: Its name.
        kind: `only in A`, `only in B`, `type` (tensor and object), `dtype`, `shape`, `values` or `object`.
        told: In words.
        values: How values differ; of kind `values` only.
    """

    key: str
    kind: str
    told: str
    values: ValueDifference | None = None


@dataclass(frozen=True)
class DiffReport:
    """What differs between two checkpoints.

    Attributes:
        compared: Keys that both have and that were compared.
        differences: `common.pt` first, then in the natural order of keys: the first is the first to differ.
    """

    compared: int
    differences: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"same": self.is_same, "compared": self.compared, "differences": [_as_json(d) for d in self.differences]}


def _as_json(difference: Difference) -> dict[str, Any]:
    told = asdict(difference)
    if difference.values is None:
        del told["values"]
    else:
        told["values"] = as_json(asdict(difference.values))
    return told


def diff(
    a: CheckpointFolder, b: CheckpointFolder, tolerance: Tolerance | None = None, pattern: str | None = None
) -> DiffReport:
    """Compare all tensors and objects, and `common.pt` (the common state of `torch_dist`) as one object.

    Args:
        a: One side, opened.
        b: The other.
        tolerance: What counts as equal; None: equal values.
        pattern: Regular expression that keys must contain; None: all keys.

    Raises:
        CheckpointError: Either is damaged.
        ConfigurationError: The pattern is no regular expression.
    """
    wanted = compiled(pattern)
    everything = {*a.tensors, *a.objects, *b.tensors, *b.objects}
    keys = natural_order(key for key in everything if wanted.search(key))
    found = list(_differences(a, b, keys, tolerance or Tolerance()))
    has_common = any((side.path / COMMON_FILE).exists() for side in (a, b)) and wanted.search(COMMON_FILE) is not None
    common = _common_difference(a, b) if has_common else None
    found = found if common is None else [common, *found]
    count = len(keys) + has_common
    return DiffReport(count - sum(item.kind.startswith("only") for item in found), tuple(found))


def _common_difference(a: CheckpointFolder, b: CheckpointFolder) -> Difference | None:
    """What differs between the files beside the tensors; at least one side has one."""
    left, right = a.path / COMMON_FILE, b.path / COMMON_FILE
    if not (left.exists() and right.exists()):
        side = "A" if left.exists() else "B"
        told = f"file with iteration, arguments and parameter groups that only {side} has"
        return Difference(COMMON_FILE, f"only in {side}", told)
    told_first = first_difference(read_common_file(a), read_common_file(b))
    return None if told_first is None else Difference(COMMON_FILE, "object", told_first)


def _differences(
    a: CheckpointFolder, b: CheckpointFolder, keys: Sequence[str], tolerance: Tolerance
) -> Iterator[Difference]:
    for key in keys:
        left, right = _entry(a, key), _entry(b, key)
        found = _described(key, left, right)
        if found is None and isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
            values = tensor_difference(a, b, key, tolerance)
            if values is not None:
                yield Difference(key, "values", _values_in_words(values, left.numel), values)
        elif found is None:
            told = object_difference(a, b, key)
            found = None if told is None else Difference(key, "object", told)
        if found is not None:
            yield found


def _entry(folder: CheckpointFolder, key: str) -> Entry:
    return folder.tensors.get(key) or folder.objects.get(key)


def _described(key: str, a: Entry, b: Entry) -> Difference | None:
    """What differs without looking at values."""
    if a is None or b is None:
        side, there = ("A", a) if b is None else ("B", b)
        return Difference(key, f"only in {side}", f"{_in_words(there)} that only {side} has")
    if type(a) is not type(b):
        return Difference(key, "type", f"{_in_words(a)} in A, {_in_words(b)} in B")
    if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
        if a.shape != b.shape:
            return Difference(key, "shape", f"{_in_words(a)} in A, {_in_words(b)} in B")
        if a.dtype != b.dtype:
            return Difference(key, "dtype", f"{_in_words(a)} in A, {_in_words(b)} in B")
    return None


def _in_words(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return f"tensor {tuple(entry.shape)} {dtype_name(entry.dtype)}"
    return "object"


def tensor_difference(
    a: CheckpointFolder, b: CheckpointFolder, key: str, tolerance: Tolerance
) -> ValueDifference | None:
    """How the values of a tensor differ, which has one shape and dtype on both sides.

    Raises:
        CheckpointError: Bytes are damaged.
    """
    equal_boxes = {right.box: j for j, right in enumerate(b.tensors[key].chunks)}
    found: ValueDifference | None = None
    for i, left in enumerate(a.tensors[key].chunks):
        if left.box in equal_boxes:  # no other can share anything with it
            overlaps = [(equal_boxes[left.box], left.box.meet(left.box))]
        else:
            overlaps = [(j, left.box.meet(right.box)) for j, right in enumerate(b.tensors[key].chunks)]
        shared = [(j, box) for j, box in overlaps if box is not None]
        found = merge(found, _chunk_difference(a, b, key, i, shared, tolerance))
    return found


def _chunk_difference(
    a: CheckpointFolder,
    b: CheckpointFolder,
    key: str,
    number: int,
    shared: Sequence[tuple[int, Box]],
    tolerance: Tolerance,
) -> ValueDifference | None:
    """One chunk of A against those of B that it shares the boxes with."""
    if not shared:
        return None
    here = Piece(a.tensors[key].chunks[number].box, a.read_chunk(key, number))
    found: ValueDifference | None = None
    for j, box in shared:
        there = Piece(b.tensors[key].chunks[j].box, b.read_chunk(key, j))
        found = merge(found, compare_piece(here.part(box), there.part(box), box, tolerance))
        del there  # before the next one is read
    return found


def object_difference(a: CheckpointFolder, b: CheckpointFolder, key: str) -> str | None:
    """Where an object differs, in words; None where it does not.

    Raises:
        CheckpointError: It is damaged or asks for code.
    """
    if a.read_bytes(key) == b.read_bytes(key):
        return None
    return first_difference(a.read_object(key), b.read_object(key))


def _values_in_words(found: ValueDifference, numel: int) -> str:
    place = f"[{', '.join(map(str, found.index))}]" if found.index else "the only element"
    left, right = found.values
    return (
        f"{found.count} of {numel} elements differ, first at {place}: {left!r} in A, {right!r} in B; "
        f"by {found.largest:.3g} at most"
    )
