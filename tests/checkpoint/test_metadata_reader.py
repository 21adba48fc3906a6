"""Rows of boxes, which the reader takes at once: the same entries as one by one, and lies in them are refused."""

from __future__ import annotations

import io
import os
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties

from megatron_fsdp.checkpoint import metadata_reader
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.metadata_reader import Rows, load_metadata
from megatron_fsdp.checkpoint.save_plan import Layouts, PlannedMetadata, SavedTensor, Written, boxes_of
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import BufferCut, MeshUse, ShardDescription

RANKS = 4
BYTES = 1 << 34  # of each file, with holes


def saved_tensor(key: str, shape: tuple[int, ...], offset: int, shard_numel: int, ranks: int = RANKS) -> SavedTensor:
    numel = torch.Size(shape).numel()
    cut = BufferCut(offset, shard_numel, ranks, numel)
    description = ShardDescription(shape, MeshUse((ranks,), (0,)), (0,), cut) if shard_numel else None
    return SavedTensor(key, tuple(key.split(".")), shape, TensorProperties(torch.float32), description)


TENSORS = [
    saved_tensor("a.odd", (7, 5, 3), 2, 28),  # cut inside of rows: many boxes of several lengths
    saved_tensor("a.same", (7, 5, 3), 2, 28),  # which shares its boxes
    saved_tensor("b.rows", (40, 6), 0, 60),
    saved_tensor("b.scalar", (), 0, 0),
    saved_tensor("c.long", (1 << 20, 1 << 12), 0, 1 << 30),  # lengths and offsets in files that need 64 bits
]


def write(folder: Path, tensors: list[SavedTensor] = TENSORS, ranks: int = RANKS) -> Path:
    """Write what a save of so many ranks writes, with files that are nothing but long."""
    layouts = Layouts(tensors, ranks)
    everyone = layouts.bits_of({tensor.key for tensor in tensors})
    found = PlannedMetadata({"step": BytesStorageMetadata()}, {"step": ("step",)})
    found.assignment = layouts.assign([everyone] * ranks)
    found.storage_data = {MetadataIndex("step"): _StorageInfo("__0_0.distcp", 0, 9)}
    counts = np.zeros(ranks, int)
    for tensor, writers in zip(tensors, found.assignment.writers, strict=True):
        counts[writers] += boxes_of(tensor.shape, tensor.description, ranks).counts
    written = [Written(9, np.full(n, 700, np.uint16), np.zeros(1, np.uint64)) for n in counts.tolist()]
    stream = io.BytesIO()
    found.dump([f"__{rank}_0.distcp" for rank in range(ranks)], written, stream)
    folder.mkdir()
    (folder / ".metadata").write_bytes(stream.getvalue())
    for rank in range(ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(BYTES)
    return folder


def contents(folder: Path) -> dict[str, Any]:
    opened = CheckpointFolder(folder)
    tensors = {key: (entry.shape, entry.dtype, list(entry.chunks)) for key, entry in opened.tensors.items()}
    return {"tensors": tensors, "objects": opened.objects, "paths": opened.paths, "files": opened.files}


def num_rows(raw: bytes) -> int:
    """Count the tensors whose places are read at once."""
    return sum(isinstance(found, Rows) for found in load_metadata(io.BytesIO(raw), "here").storage_data.values())


@pytest.mark.parametrize("at_once", [1, 3, metadata_reader._AT_ONCE])
def test_rows_are_what_they_are_one_by_one(tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as Python's own reader takes them."""
    monkeypatch.setattr(metadata_reader, "_AT_ONCE", at_once)
    at_once = contents(write(tmp_path / "rows"))
    raw = (tmp_path / "rows/.metadata").read_bytes()
    assert num_rows(raw) == len(TENSORS)
    plain = pickle.loads(raw)
    path = tmp_path / "rows/.metadata"
    path.write_bytes(pickle.dumps(plain))
    assert num_rows(path.read_bytes()) == 0
    assert contents(tmp_path / "rows") == at_once
    for key, (shape, _, chunks) in at_once["tensors"].items():
        described = plain.state_dict_metadata[key]
        assert shape == tuple(described.size)
        assert [(chunk.box.offsets, chunk.box.lengths) for chunk in chunks] == [
            (tuple(each.offsets), tuple(each.sizes)) for each in described.chunks
        ]
        for chunk in chunks:
            info = plain.storage_data[MetadataIndex(key, torch.Size(chunk.box.offsets))]
            assert vars(chunk.span) == {"file": info.relative_path, "offset": info.offset, "length": info.length}
    assert max(chunk.span.offset for chunk in at_once["tensors"]["c.long"][2]) > 0
    assert any(chunk.span.length > 1 << 31 for chunk in at_once["tensors"]["c.long"][2])
    same = CheckpointFolder(write(tmp_path / "again")).tensors
    assert same["a.odd"].chunks.boxes is same["a.same"].chunks.boxes is not same["b.rows"].chunks.boxes


def first_chunk(raw: bytes, number: int) -> int:
    """Return the place of a number in the second row of chunks: of the offsets, then of the lengths."""
    found = metadata_reader._CHUNK[0].search(raw)
    assert found is not None
    second = metadata_reader._CHUNK[0].match(raw, found.end())
    assert second is not None
    return second.start("offsets" if number < 3 else "lengths") + 5 * (number % 3) + 1


def first_place(raw: bytes, name: str) -> int:
    """Return the place of a number in the second row of the places of a tensor."""
    starts = [found.start() for found in metadata_reader._PLACE[0].finditer(raw)]
    found = metadata_reader._PLACE[0].match(raw, starts[1])
    assert found is not None
    return found.start(name) + 1


def second_memo(raw: bytes) -> int:
    """Return the place of the number that the second row of chunks has in the memo."""
    return metadata_reader._CHUNK[0].match(raw, metadata_reader._CHUNK[0].search(raw).end()).start("memos") + 1  # type: ignore[union-attr]


def put(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


LIES: dict[str, tuple[Callable[[bytes], int], int, str]] = {
    "a negative offset": (lambda raw: first_chunk(raw, 0), -1, "something else where lengths should stand"),
    "a negative length": (lambda raw: first_chunk(raw, 4), -1, "something else where lengths should stand"),
    "a box outside": (lambda raw: first_chunk(raw, 0), 7, "has a chunk outside of it"),
    "another offset": (lambda raw: first_chunk(raw, 2), 1, "a.odd of shape (7, 5, 3)"),
    "fewer elements": (lambda raw: first_chunk(raw, 5), 0, "is incomplete"),
    "two boxes with one number": (second_memo, 3, "numbers of the memo that are not counted up"),
    "a place of another box": (lambda raw: first_place(raw, "memos"), 3, "numbers of the memo that are not counted up"),
    "a place in no file": (lambda raw: first_place(raw, "files"), 1 << 30, "not a file of the folder"),
    "a place in what is no name": (lambda raw: first_place(raw, "files"), 1, "not a file of the folder"),
    "a negative place": (lambda raw: first_place(raw, "offsets"), -9, "something else where lengths should stand"),
    "a place beyond the file": (lambda raw: first_place(raw, "offsets"), (1 << 31) - 1, "is cut off"),
    "a place that is too short": (lambda raw: first_place(raw, "lengths"), 3, "in 3 bytes"),
}


@pytest.mark.parametrize("kind", LIES)
def test_lies_in_rows_are_refused(tmp_path: Path, kind: str) -> None:
    where, value, told = LIES[kind]
    folder = write(tmp_path / "lying")
    if kind == "a place beyond the file":
        for rank in range(RANKS):
            os.truncate(folder / f"__{rank}_0.distcp", 1 << 30)
    raw = (folder / ".metadata").read_bytes()
    CheckpointFolder(folder, check=False)
    at = where(raw)
    (folder / ".metadata").write_bytes(raw[:at] + put(value) + raw[at + 4 :])
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder(folder)
    assert told in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("field", ["offsets", "lengths"])
def test_boxes_of_other_dimensions_are_refused(tmp_path: Path, field: str) -> None:
    folder = write(tmp_path / "lying")
    raw = (folder / ".metadata").read_bytes()
    scalar = next(row for row in metadata_reader._CHUNK[0].finditer(raw) if row["offsets"] == row["lengths"] == b"")
    (folder / ".metadata").write_bytes(raw[: scalar.start(field)] + b"J" + put(1) + raw[scalar.start(field) :])
    with pytest.raises(CheckpointError, match=r"b.scalar of shape \(\) has a chunk of other dimensions"):
        CheckpointFolder(folder)


def test_boxes_of_two_tensors_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Else the places of one would be those of the other, as pickle reads them."""
    folder = write(tmp_path / "lying")
    raw = (folder / ".metadata").read_bytes()
    rows = list(metadata_reader._CHUNK[0].finditer(raw))
    first, scalar = rows[0], next(row for row in rows if row["offsets"] == b"")
    for at in (
        scalar.start("memos") + 1,
        *(found.start() for found in re.finditer(re.escape(scalar["memos"][1:]), raw)),
    ):
        raw = raw[:at] + first["memos"][1:] + raw[at + 4 :]
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match="number"):
        CheckpointFolder(folder)


def test_places_of_another_tensor_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "lying")
    raw = (folder / ".metadata").read_bytes()
    *_, b1, b2, b3, b4, _, c1, c2, c3, c4 = metadata_reader._PLACE[0].finditer(raw)
    for own, other in ((b1, c1), (b2, c2), (b3, c3), (b4, c4)):
        raw = raw[: own.start("memos")] + other["memos"] + raw[own.end("memos") :]
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"b\.rows is listed but nothing says where its bytes are"):
        CheckpointFolder(folder)


def test_metadata_cut_off_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the process lives, which one that maps the file would not."""
    path, take = write(tmp_path / "cut") / ".metadata", metadata_reader._MetadataUnpickler._rows

    def cut_off(*given: Any) -> Any:
        os.truncate(path, 100)
        return take(*given)

    monkeypatch.setattr(metadata_reader, "_AT_ONCE", 1)
    monkeypatch.setattr(metadata_reader._MetadataUnpickler, "_rows", cut_off)
    with pytest.raises(CheckpointError, match=r"cut/\.metadata is damaged"):
        CheckpointFolder(path.parent)


def test_metadata_are_not_held_in_memory(tmp_path: Path) -> None:
    """Only numbers are: at most 12 bytes for the place of a box, to which the file gives more than 50."""
    ranks, numel = 512, 512 * 50
    tensors = [saved_tensor(f"key.{n}", (numel // 16, 4, 4), 2, 51, ranks) for n in range(64)]
    folder = write(tmp_path / "large", tensors, ranks)
    file_bytes = (folder / ".metadata").stat().st_size
    boxes = sum(len(entry.chunks) for entry in CheckpointFolder(folder, check=False).tensors.values())
    assert boxes * 50 < file_bytes
    tracemalloc.start()
    CheckpointFolder(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < file_bytes / 2


@pytest.mark.parametrize("operation", [pickle.BINUNICODE8, pickle.BINBYTES8])
def test_lengths_of_text_take_no_memory(tmp_path: Path, operation: bytes) -> None:
    path = write(tmp_path / "long") / ".metadata"
    path.write_bytes(pickle.PROTO + b"\4" + operation + (1 << 33).to_bytes(8, "little") + b"text" + pickle.STOP)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointFolder(path.parent)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_sums_of_lengths_may_need_more_than_64_bits(tmp_path: Path) -> None:
    """They tell how often the bytes of a file are pointed to, and may not begin anew at zero."""
    opened = CheckpointFolder(write(tmp_path / "sharing"), check=False)
    chunks = opened.tensors["c.long"].chunks
    chunks.files[:], chunks.lengths[:] = 0, 1 << 61
    assert len(chunks) == RANKS
    assert opened._use_of_files["__0_0.distcp"][1] >= RANKS << 61


@pytest.mark.parametrize("at", range(0, 100, 7))
def test_cut_off_metadata_are_refused(tmp_path: Path, at: int) -> None:
    folder = write(tmp_path / "cut")
    raw = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw[: len(raw) * at // 100])
    with pytest.raises(CheckpointError, match=r"cut/\.metadata"):
        CheckpointFolder(folder)
