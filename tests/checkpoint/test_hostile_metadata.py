"""Metadata, manifests and headers of tensors that lie: refused, whatever reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from tests.support import hostile
from tests.support.byte_damage import saved_bytes
from tests.support.hostile_readers import READERS, WEIGHT, Reader, refused, write_linear


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    write_linear(tmp_path / "iter_0000001")
    return tmp_path / "iter_0000001"


@pytest.mark.parametrize(
    ("numel", "size", "stride", "start", "key"),
    [
        (1 << 20, (3, 4), (4, 1), 0, "0"),  # more elements than the record has
        (12, (3, 4), (4, 1), 1, "0"),  # beyond the end
        (12, (3, 4), (1 << 40, 1), 0, "0"),
        (12, (1 << 50, 4), (0, 0), 0, "0"),  # one element that stands for many
        (12, (3, 4), (-4, 1), 0, "0"),
        (12, (-3, -4), (4, 1), 0, "0"),
        (12, (3, 4), (4,), 0, "0"),
        (-1, (3, 4), (4, 1), 0, "0"),
        (12, (3, 4), (4, 1), 0, "../../etc/passwd"),
        (12, (3, 4), (4, 1), 0, "1"),
        (12, (3, 4), (0, 0), 0, "0"),
    ],
)
def test_tensors_that_claim_what_is_not_there(
    folder: Path, numel: int, size: tuple[int, ...], stride: tuple[int, ...], start: int, key: str
) -> None:
    pickled = hostile.tensor_pickle(numel, size, stride, start=start, key=key)
    raw = bytes(48) if stride != (0, 0) or size != (3, 4) else bytes(4)
    if len(raw) == 4:
        pickled = hostile.tensor_pickle(1, size, stride)
    hostile.plant(folder, WEIGHT, hostile.archive_of(pickled, data_0=raw))
    for read in READERS:
        refused(read, folder, folder / "marker", WEIGHT)


def test_the_same_tensor_without_a_lie_is_read(folder: Path) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    pickled = hostile.tensor_pickle(12, (3, 4), (4, 1))
    hostile.plant(folder, WEIGHT, hostile.archive_of(pickled, data_0=values.numpy().tobytes()))
    assert torch.equal(CheckpointFolder(folder).read_tensor(WEIGHT), values)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "a\0b", "\x1b[2J", "x" * 300]
)
@pytest.mark.parametrize("read", READERS)
def test_paths_that_leave_the_folder(folder: Path, read: Reader, name: str) -> None:
    (folder.parent / "outside").write_bytes(saved_bytes(torch.ones(3, 4)))

    def change(found: Metadata) -> None:
        places: dict[MetadataIndex, Any] = found.storage_data
        places.update({i: _StorageInfo(name, 0, 10) for i in places if i.fqn == WEIGHT})

    hostile.edit_metadata(folder, change)
    refused(read, folder, folder / "marker", "not a file of the folder", WEIGHT)


def _offset(found: Metadata) -> None:
    next(iter(found.storage_data.values())).offset = -1


def _length(found: Metadata) -> None:
    next(iter(found.storage_data.values())).length = 1 << 61


def _huge(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT].size = torch.Size([1 << 50, 1 << 50])  # type: ignore[union-attr]


def _digits(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT].size = (10**5000, 4)  # type: ignore[union-attr,assignment]


def _twice(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata[WEIGHT]
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 2]))] * 2


def _no_chunks(found: Metadata) -> None:
    entry: Any = found.state_dict_metadata[WEIGHT]
    entry.chunks = None


def _no_size(found: Metadata) -> None:
    del found.state_dict_metadata[WEIGHT].__dict__["size"]


def _key(found: Metadata) -> None:
    found.state_dict_metadata["\x1b]0;title\a"] = found.state_dict_metadata[WEIGHT]


def _number_key(found: Metadata) -> None:
    found.state_dict_metadata[3] = found.state_dict_metadata[WEIGHT]  # type: ignore[index]


def _extension(found: Metadata) -> None:
    next(iter(found.storage_data.values())).transform_descriptors = ["stream.unknown/1"]


def _nothing(found: Metadata) -> None:
    found.__dict__.clear()


@pytest.mark.parametrize(
    "change",
    [_offset, _length, _huge, _digits, _twice, _no_chunks, _no_size, _key, _number_key, _extension, _nothing],
)
@pytest.mark.parametrize("read", READERS)
def test_metadata_that_make_no_sense(folder: Path, read: Reader, change: Callable[[Metadata], None]) -> None:
    hostile.edit_metadata(folder, change)
    refused(read, folder, folder / "marker")


MANIFESTS = {
    "deep": "[" * 100_000,
    "deeper": '{"a":' * 100_000,
    "a list": "[]",
    "a number": "1" * 5000,
    "nothing": "{}",
    "text": '"' + "x" * 1000 + '"',
    "wrong types": '{"version": 1, "tensors": [], "objects": 3, "facts": {}, "checksum_name": "x"}',
    "wrong shapes": '{"version": 1, "tensors": {"a": {"shape": "3", "dtype": 1, "checksum": 2}}, "objects": {}, '
    '"facts": {}, "checksum_name": "x"}',
    "version of text": '{"version": "1", "tensors": {}, "objects": {}, "facts": {}, "checksum_name": "x"}',
    "version of truth": '{"version": true, "tensors": {}, "objects": {}, "facts": {}, "checksum_name": "x"}',
    "infinity": '{"version": Infinity}',
    "newer": '{"version": 2}',
    "other": '{"version": 1, "tensors": {"\\u001b[2J": {"shape": [1], "dtype": "torch.int8", "checksum": "0"}}, '
    '"objects": {}, "facts": {}, "checksum_name": "x"}',
}


@pytest.mark.parametrize("kind", sorted(MANIFESTS))
@pytest.mark.parametrize("read", READERS)
def test_a_manifest_that_is_none(folder: Path, read: Reader, kind: str) -> None:
    (folder / "manifest.json").write_text(MANIFESTS[kind])
    refused(read, folder, folder / "marker", "manifest.json", *(["update the library"] if kind == "newer" else []))
