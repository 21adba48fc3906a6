"""Boxes are read by byte range: the right elements, and not a byte more."""

import io
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from megatron_fsdp.checkpoint.hf.index import MODEL_FILE, open_folder
from megatron_fsdp.checkpoint.hf.reading import FolderReader, portions, runs
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, offsets, strict=True))
    return shape, Box(offsets, lengths)


def index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))


@given(shapes_and_boxes())
def test_runs_are_the_elements_of_a_box_in_order(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = [first + i for first, count in runs(shape, box) for i in range(count)]
    assert found == whole[index_of(box)].reshape(-1).tolist()


def test_runs_are_as_long_as_can_be() -> None:
    assert list(runs((4, 3, 2), Box((1, 0, 0), (2, 3, 2)))) == [(6, 12)]
    assert list(runs((4, 3, 2), Box((1, 1, 0), (2, 2, 2)))) == [(8, 4), (14, 4)]
    assert list(runs((4, 6), Box((3, 2), (1, 3)))) == [(20, 3)]
    assert list(runs((), Box((), ()))) == [(0, 1)]


@given(shapes_and_boxes(), st.integers(1, 4), st.integers(1, 40))
def test_portions_cover_a_box_in_order_within_the_limit(
    case: tuple[tuple[int, ...], Box], itemsize: int, limit: int
) -> None:
    shape, box = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = list(portions(box, itemsize, limit))
    assert all(piece.numel * itemsize <= limit or piece.numel == 1 for piece in pieces)
    found = [value for piece in pieces for value in whole[index_of(piece)].reshape(-1).tolist()]
    assert found == whole[index_of(box)].reshape(-1).tolist()


def test_only_the_bytes_of_a_box_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(6, 4, 5).to(torch.bfloat16)
    save_file({"first": torch.randn(3), "w": values}, tmp_path / MODEL_FILE)
    stored = open_folder(tmp_path).tensors["w"]
    asked: list[int] = []

    class Counting(io.FileIO):
        def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
            asked.append(len(buffer))
            return super().readinto(buffer)

    monkeypatch.setattr("megatron_fsdp.checkpoint.hf.reading.io.FileIO", Counting)
    box = Box((1, 1, 2), (2, 3, 2))
    with FolderReader(tmp_path) as reader:
        assert torch.equal(reader.read(stored, box), values[1:3, 1:4, 2:4])
        assert asked == [4] * 6
        assert reader.bytes_read == box.numel * 2
        assert reader.read(stored, Box((6, 0, 0), (0, 4, 5))).shape == (0, 4, 5)
        assert reader.bytes_read == box.numel * 2


def test_a_file_that_was_cut_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.randn(300)}, tmp_path / MODEL_FILE)
    stored = open_folder(tmp_path).tensors["w"]
    content = (tmp_path / MODEL_FILE).read_bytes()
    (tmp_path / MODEL_FILE).write_bytes(content[:-4])
    with FolderReader(tmp_path) as reader:
        with pytest.raises(CheckpointError, match="ended inside of tensor 'w'"):
            reader.read(stored, Box((0,), (300,)))
        (tmp_path / MODEL_FILE).unlink()
    with FolderReader(tmp_path) as reader, pytest.raises(CheckpointError, match="cannot be read at tensor 'w'"):
        reader.read(stored, Box((0,), (1,)))
