"""Parts of chunks: read alone where their elements lie in order, and right in any case."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box
from tests.support.torch_dist import chunked, plain

STACK = torch.arange(3 * 4 * 6, dtype=torch.float32).reshape(3, 4, 6)
TENSORS = {
    "stack": STACK,
    "bfloat16": STACK.bfloat16(),
    "transposed": STACK.transpose(0, 1).contiguous().transpose(0, 1),
    "bytes": torch.arange(24, dtype=torch.uint8).reshape(3, 4, 2),
    "flag": torch.arange(24).reshape(3, 4, 2) % 2 == 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    path = tmp_path_factory.mktemp("partial")
    cut = {f"{key}_cut": chunked(plain(tensor, (1, 2, 2))) for key, tensor in TENSORS.items()}
    save_alone({**TENSORS, **cut, "scalar": torch.tensor(3.0)}, checkpoint_id=path)
    return CheckpointFolder(path)


@settings(max_examples=60)
@given(st.sampled_from(sorted(TENSORS)), st.booleans(), st.data())
def test_any_box_of_any_chunks_is_the_tensors(
    folder: CheckpointFolder, key: str, cut: bool, data: st.DataObject
) -> None:
    tensor = TENSORS[key]
    offsets = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
    lengths = [data.draw(st.integers(0, size - start)) for size, start in zip(tensor.shape, offsets, strict=True)]
    wanted = tensor[Box(tuple(offsets), tuple(lengths)).indices]
    found = folder.read_box(f"{key}_cut" if cut else key, offsets, lengths)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("first", "last"), [((1, 2, 0), (2, 4, None)), ((0, 1, 1), (3, 3, 2))], ids=["layer", "columns"]
)
def test_a_part_of_a_stack_is_read_without_the_rest(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, first: tuple[int, ...], last: tuple[int | None, ...]
) -> None:
    monkeypatch.setattr(CheckpointFolder, "_read", lambda *_: pytest.fail("a whole chunk was read"))
    for key in ("stack", "bfloat16", "bytes", "flag"):
        wanted = TENSORS[key][tuple(map(slice, first, last))]
        found = folder.read_box(key, first, wanted.shape)
        assert torch.equal(found, wanted)
        assert found.untyped_storage().nbytes() == found.nbytes


def test_a_tensor_whose_elements_lie_in_another_order_is_read_whole(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[int] = []
    read = CheckpointFolder._read

    def counted(self: CheckpointFolder, *arguments: Any) -> Tensor:
        whole.append(1)
        return read(self, *arguments)

    monkeypatch.setattr(CheckpointFolder, "_read", counted)
    assert torch.equal(folder.read_box("transposed", (1, 0, 0), (1, 4, 6)), STACK[1:2])
    assert whole == [1]


def test_a_box_outside_of_the_tensor_is_refused(folder: CheckpointFolder) -> None:
    with pytest.raises(CheckpointError, match=r"stack of shape \(3, 4, 6\) has no box"):
        folder.read_box("stack", (2, 0, 0), (2, 4, 6))
    with pytest.raises(CheckpointError, match="has no tensor nothing"):
        folder.read_box("nothing", (), ())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A folder with one tensor, the bytes of its file, and where its elements begin in it."""
    path = tmp_path_factory.mktemp("alone")
    save_alone({"stack": STACK}, checkpoint_id=path)
    (file,) = path.glob("*.distcp")
    raw = file.read_bytes()
    return file, raw, raw.index(STACK.numpy().tobytes())


def test_lengths_that_no_checksum_covers_are_not_trusted(alone: tuple[Path, bytes, int]) -> None:
    """Of the name and of the padding, in front of the elements: they decide where these begin."""
    file, raw, elements = alone
    header = raw.rindex(b"PK\3\4", 0, elements)
    for place in range(header + 26, header + 30):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with pytest.raises(CheckpointError, match="stack"):
            CheckpointFolder(file.parent).read_box("stack", (1, 0, 0), (1, 4, 6))


@given(st.data())
def test_damaged_archives_are_refused_or_read_right(alone: tuple[Path, bytes, int], data: st.DataObject) -> None:
    file, raw, elements = alone
    places = [*range(elements), *range(elements + STACK.nbytes, len(raw))]
    damaged = bytearray(raw)
    damaged[data.draw(st.sampled_from(places))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(damaged)
    found, refused = None, ""
    try:
        found = CheckpointFolder(file.parent).read_box("stack", (1, 0, 0), (1, 4, 6))
    except CheckpointError as error:
        refused = str(error)
    assert "stack" in refused if found is None else torch.equal(found, STACK[1:2])
