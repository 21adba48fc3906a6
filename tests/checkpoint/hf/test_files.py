"""The weight files of a folder: what is refused, which tensors there are, boxes read from them, and new ones."""

import contextlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import safetensors
import torch
from hypothesis import example, given
from safetensors.torch import save_file

from megatron_fsdp.checkpoint.hf.files import (
    DTYPES,
    INDEX_FILE,
    MODEL_FILE,
    FolderReader,
    StoredTensor,
    open_folder,
    portions,
    read_header,
    write_file,
)
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box

# ---- headers ---------------------------------------------------------------------------------------------------------

GOOD = {
    "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "a.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
}
DATA = bytes(range(32))


def as_file(header: Any, data: bytes = DATA, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def changed(key: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, key: {**GOOD[key], **fields}}


LONG = "n" * 1_000_000
# The library compares headers with the bytes of the file; that it is asked, and its refusals told, shows here.
BAD: dict[str, bytes] = {
    "nothing": b"",
    "huge length": as_file(GOOD, length=2**63),
    "no JSON": as_file(b"{'a': 1}"),
    "unknown dtype": as_file(changed("b", dtype="F5")),
    "dtype of half a byte": as_file({"w": {"dtype": "F4", "shape": [64], "data_offsets": [0, 32]}}),
    "shape does not fit bytes": as_file(changed("b", shape=[2, 2])),
    "out of the file": as_file(changed("a.weight", data_offsets=[64, 72])),
    "truncated data": as_file(GOOD, DATA[:-1]),
    "many dimensions": as_file(changed("b", shape=[1 << 61] * 60_000)),
    "a large dimension": as_file(changed("b", shape=[10**4000] * 4)),
    "a long key": as_file({LONG: GOOD["b"]}),
    "a long dtype": as_file(changed("b", dtype=LONG)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD[name])
    with pytest.raises(CheckpointError, match=r"cannot be read as safetensors|has dtype 'F4', which") as raised:
        read_header(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) <= 2000


WHOLE = as_file({"__metadata__": {"format": "pt"}, **GOOD})


@given(
    edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, len(WHOLE)),
    added=st.binary(max_size=4),
)
@example(edits=[], cut=len(WHOLE), added=b"")
def test_whatever_the_bytes_are_they_are_refused_or_read(
    edits: list[tuple[int, int]], cut: int, added: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(WHOLE)
    for place, value in edits:
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(bytes(content[:cut] if cut < len(WHOLE) - 6 else content) + added)
    tensors: dict[str, StoredTensor] = {}
    with contextlib.suppress(CheckpointError):  # nothing else is raised
        tensors, _ = read_header(path)
    reader = FolderReader(path.parent)
    for tensor in tensors.values():
        values = reader.read(tensor, Box((0,) * len(tensor.shape), tensor.shape))
        assert (values.dtype, tuple(values.shape)) == (tensor.dtype, tensor.shape)


# ---- which files a folder has ----------------------------------------------------------------------------------------

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_sharded(folder: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, folder / FIRST)
    save_file({"c": torch.ones(1, dtype=torch.int32)}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_files_of_an_index_are_found(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    files = open_folder(tmp_path)
    assert {key: tensor.file for key, tensor in files.tensors.items()} == {"a": FIRST, "b": FIRST, "c": SECOND}
    assert files.sizes == {name: (tmp_path / name).stat().st_size for name in (FIRST, SECOND)}


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"z": torch.ones(3)}, tmp_path / "blobs" / "1234")
    (tmp_path / "snapshot" / MODEL_FILE).symlink_to("../blobs/1234")
    assert set(open_folder(tmp_path / "snapshot").tensors) == {"z"}


def outside(folder: Path) -> None:
    save_file({"c": torch.ones(1)}, folder.parent / "out.safetensors")
    write_index(folder, {"a": FIRST, "b": FIRST, "c": "../out.safetensors"})


def _index(weight_map: object) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, weight_map)


def _cut(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-1])


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a path out of the folder": (outside, "'c' is in '../out.safetensors'"),
    "a file as a number": (_index({"a": 3}), "'a' is in 3"),
    "a long file": (_index({"w": LONG}), "safetensors"),
    "no map": (_index(["a"]), "no weight_map"),
    "no JSON": (lambda folder: (folder / INDEX_FILE).write_text("{") and None, "cannot be read as JSON"),
    "nested deeply": (
        lambda folder: (folder / INDEX_FILE).write_text("[" * 200_000) and None,
        "cannot be read as JSON",
    ),
    "a missing file": (
        lambda folder: (folder / SECOND).unlink(),
        f"{SECOND} is missing; {INDEX_FILE} names it for 'c'",
    ),
    "a cut file": (_cut, f"{SECOND} cannot be read as safetensors"),
    "a tensor that its file lacks": (
        _index({"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}),
        f"'d' is in {SECOND}, and it is in none",
    ),
    "a tensor that the index lacks": (_index({"a": FIRST, "c": SECOND}), f"'b' is in no file, and it is in {FIRST}"),
    "a tensor in another file": (
        _index({"a": SECOND, "b": FIRST, "c": SECOND}),
        f"'a' is in {SECOND}, and it is in {FIRST}",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_index_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_sharded(folder)
    spoil, said = SPOILED[name]
    spoil(folder)
    with pytest.raises(CheckpointError) as raised:
        open_folder(folder)
    assert said in str(raised.value)
    assert len(str(raised.value)) <= 2000


def test_a_wrong_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"neither {re.escape(MODEL_FILE)} nor"):
        open_folder(tmp_path)
    save_file({"z": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"it holds other\.safetensors, rename it"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: a pickle"):
        open_folder(tmp_path)


def test_a_file_that_differs_here_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    files = open_folder(tmp_path)
    files.check_here()
    (tmp_path / SECOND).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"{SECOND} has 1 bytes, and had"):
        files.check_here()
    (tmp_path / FIRST).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST} is not there"):
        files.check_here()


# ---- boxes -----------------------------------------------------------------------------------------------------------


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, offsets, strict=True))
    return shape, Box(offsets, lengths)


@given(shapes_and_boxes(), st.integers(1, 4), st.integers(1, 40))
def test_portions_cover_a_box_in_order_within_the_limit(
    case: tuple[tuple[int, ...], Box], itemsize: int, limit: int
) -> None:
    shape, box = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = list(portions(box, itemsize, limit))
    assert all(piece.numel * itemsize <= limit or piece.numel == 1 for piece in pieces)
    found = [value for piece in pieces for value in whole[piece.indices].reshape(-1).tolist()]
    assert found == whole[box.indices].reshape(-1).tolist()


def test_only_a_box_is_read_and_nothing_is_copied(tmp_path: Path) -> None:
    values = torch.randn(6, 4, 5).to(torch.bfloat16)
    save_file({"first": torch.randn(3), "w": values, "scalar": torch.tensor(3.0)}, tmp_path / MODEL_FILE)
    stored = open_folder(tmp_path).tensors
    reader, box = FolderReader(tmp_path), Box((1, 1, 2), (2, 3, 2))
    found = reader.read(stored["w"], box)
    assert torch.equal(found, values[1:3, 1:4, 2:4])
    assert found.stride() == values.stride()  # a view of the mapped file
    assert reader.bytes_read == box.numel * 2
    assert reader.read(stored["w"], Box((6, 0, 0), (0, 4, 5))).shape == (0, 4, 5)
    assert reader.read(stored["scalar"], Box((), ())).item() == 3.0
    assert reader.bytes_read == box.numel * 2 + 4


def test_a_file_that_changed_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.randn(300)}, tmp_path / MODEL_FILE)
    stored, content = open_folder(tmp_path).tensors["w"], (tmp_path / MODEL_FILE).read_bytes()
    (tmp_path / MODEL_FILE).write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors"):
        FolderReader(tmp_path).read(stored, Box((0,), (300,)))
    save_file({"w": torch.randn(200)}, tmp_path / MODEL_FILE)
    with pytest.raises(CheckpointError, match="has changed while it was read, at 'w'"):
        FolderReader(tmp_path).read(stored, Box((0,), (300,)))
    (tmp_path / MODEL_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors \(No such file"):
        FolderReader(tmp_path).read(stored, Box((0,), (1,)))


# ---- new files -------------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6
    )
)
def test_files_that_are_written_are_read_back(
    shapes: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = {f"t{i}": (DTYPES[name], tuple(shape)) for i, (name, shape) in enumerate(shapes)}
    path = tmp_path_factory.getbasetemp() / "y.safetensors"
    bits = {
        key: torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8) for key, (dtype, shape) in wanted.items()
    }
    write_file(path, {key: values.view(wanted[key][0]).view(wanted[key][1]) for key, values in bits.items()})
    tensors, _ = read_header(path)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()} == wanted
    reader = FolderReader(path.parent)
    for key, tensor in tensors.items():
        found = reader.read(tensor, Box((0,) * len(tensor.shape), tensor.shape))
        assert torch.equal(found.contiguous().unsqueeze(-1).view(torch.uint8), bits[key])
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
