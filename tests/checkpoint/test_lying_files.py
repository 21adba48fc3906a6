"""Files that say what cannot be, and what is no file: refused without waiting, in messages of bounded length."""

import itertools
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fsdp.checkpoint.folder import CheckpointFolder, cover_problem
from megatron_fsdp.checkpoint.hf.files import open_folder
from megatron_fsdp.checkpoint.run_folder import POINTER, RunFolder
from megatron_fsdp.checkpoint.safe_read import load_object_file
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.cli.main import main
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box
from tests.support import hostile
from tests.support.hostile_readers import STEP, WEIGHT, write_linear

LONGEST_MESSAGE = 2000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    write_linear(tmp_path / "iter_0000001")
    return tmp_path / "iter_0000001"


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """A reader that waits, or fills the memory, ends here instead of with the machine."""

    def stop(*_: Any) -> NoReturn:
        pytest.fail("still busy after a minute")  # no Exception, which the readers would take for damage

    before, limits = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, limits[1]))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_DATA, limits)


def refused(read: Callable[[], object], told: str = "") -> None:
    with pytest.raises(CheckpointError) as caught:
        read()
    assert told in str(caught.value)
    assert len(str(caught.value)) <= LONGEST_MESSAGE


# ---- metadata --------------------------------------------------------------------------------------------------------


def described(shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks)  # type: ignore[arg-type]


def _dims(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT] = described((1 << 61,) * 60_000, [])


def _more_dims_than_torch_has(found: Metadata) -> None:
    found.state_dict_metadata[WEIGHT] = described((1,) * 65, [])


def _claims(found: Metadata) -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 40]))
    found.state_dict_metadata[WEIGHT] = described((1 << 40,), [chunk])
    found.storage_data[MetadataIndex(WEIGHT, (0,))] = _StorageInfo("__0_0.distcp", 0, 100)


def _no_path(found: Metadata) -> None:
    found.planner_data[WEIGHT] = ("a", (1 << 20))


def _long_key(found: Metadata) -> None:
    found.state_dict_metadata["k" * 1_000_000] = found.state_dict_metadata[WEIGHT]


def _other_spelling(found: Metadata) -> None:
    """As many names for one file as one likes."""
    found.storage_data.update({index: _StorageInfo("./__0_0.distcp", 0, 9) for index in found.storage_data})


def _long_file(found: Metadata) -> None:
    found.storage_data.update({index: _StorageInfo("x" * 1_000_000, 0, 9) for index in found.storage_data})


def _transforms(found: Metadata) -> None:
    next(iter(found.storage_data.values())).transform_descriptors = ["stream.zstd/1"] * 1000


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_dims, "something else where lengths should stand"),
        (_more_dims_than_torch_has, "something else where lengths should stand"),
        (_claims, "has a chunk of (1099511627776,) in 100 bytes"),
        (_no_path, "no path"),
        (_long_key, "a key of 1000000 characters"),
        (_long_file, "not a file of the folder"),
        (_other_spelling, "not a file of the folder"),
        (_transforms, "a few named transforms"),
    ],
)
def test_metadata_that_cannot_be_true(folder: Path, change: Callable[[Metadata], None], told: str) -> None:
    hostile.edit_metadata(folder, change)
    refused(lambda: CheckpointFolder(folder), told)
    assert not verify(folder, deep=False).is_whole


def test_a_lack_of_memory_is_told_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(*_: Any, **__: Any) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("megatron_fsdp.checkpoint.safe_read._load_archive", lacking)
        refused(lambda: CheckpointFolder(folder).read_object(STEP), "there is not enough memory to read")
    with monkeypatch.context() as patch:
        patch.setattr("megatron_fsdp.cli.checkpoint_inspect.inspect_folder", lacking)
        assert main(["checkpoint", "inspect", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("error: there is not enough memory for this")


def test_boxes_that_do_not_hold_each_element_once_are_seen() -> None:
    """Also where as many elements are held twice as not at all; 2^10 boxes that all share a stretch take no time."""
    halves = [Box(offsets, (1,) * 10) for offsets in itertools.product((0, 1), repeat=10)]
    assert cover_problem((2,) * 10, halves) is None
    assert cover_problem((2,) * 10, [*halves[:-1], halves[0]]) == "has elements more than once"
    assert cover_problem((4, 4), [Box((0, 0), (2, 3)), Box((2, 1), (2, 3)), Box((0, 2), (2, 2))]) is not None
    assert cover_problem((), [Box((), ())]) is None
    assert cover_problem((), [Box((), ())] * 2) is not None
    assert cover_problem((3, 0), []) is None


# ---- what is no file -------------------------------------------------------------------------------------------------


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


NO_FILES: list[Callable[[Path], None]] = [_pipe, _endless, _socket, Path.mkdir]


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize(
    "name", ["manifest.json", ".metadata", "__0_0.distcp", "common.pt", "metadata.json", "structure.json"]
)
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    for words in (["inspect"], ["verify"], ["show", WEIGHT], ["to-torch", "--tensors-only", str(folder / "out.pt")]):
        assert main(["checkpoint", words[0], str(folder), *words[1:]]) in (0, 1, 2)
    if name in ("manifest.json", ".metadata", "__0_0.distcp"):
        refused(lambda: CheckpointFolder(folder))
        assert not verify(folder).is_whole


@pytest.mark.parametrize("make", NO_FILES)
def test_a_pointer_that_is_no_file(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder.parent / POINTER)
    refused(lambda: RunFolder(folder.parent).latest(), "cannot be read")
    assert main(["checkpoint", "list", str(folder.parent)]) == 2


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "part.safetensors"])
def test_weights_that_are_no_file(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    index = {"weight_map": {"w": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    refused(lambda: open_folder(tmp_path), name if name != "model.safetensors" else "part.safetensors is missing")


@pytest.mark.parametrize("make", NO_FILES)
def test_a_state_dict_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "state.pt")
    refused(lambda: load_object_file(tmp_path / "state.pt"), "cannot be read: it is a folder, pipe, socket or device")


# ---- messages, and what is printed -----------------------------------------------------------------------------------


LONG = "n" * 1_000_000
HEADERS: dict[str, dict[str, Any]] = {
    "many dimensions": {"w": {"dtype": "F32", "shape": [1 << 61] * 60_000, "data_offsets": [0, 48]}},
    "a large dimension": {"w": {"dtype": "F32", "shape": [10**4000] * 4, "data_offsets": [0, 48]}},
    "a large offset": {"w": {"dtype": "F32", "shape": [12], "data_offsets": [0, 10**4000]}},
    "a long key": {LONG: {"dtype": "F32", "shape": [1], "data_offsets": [0, 48]}},
    "a long dtype": {"w": {"dtype": LONG, "shape": [12], "data_offsets": [0, 48]}},
    "long metadata": {"__metadata__": {"a": [LONG]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(tmp_path: Path, name: str) -> None:
    text = json.dumps(HEADERS[name]).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(48))
    refused(lambda: open_folder(tmp_path), "model.safetensors")


@pytest.mark.parametrize(
    "weight_map", [{"w": LONG}, {LONG: "no.safetensors"}, {LONG: 3}, {"w": "x" * 300 + ".safetensors"}]
)
def test_an_index_with_long_names(tmp_path: Path, weight_map: dict[str, Any]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(lambda: open_folder(tmp_path), "safetensors")


@pytest.mark.parametrize(
    "manifest",
    [
        {"version": LONG},
        {"version": 1, "tensors": {LONG: {"shape": [1], "dtype": "x", "checksum": "0"}}},
        {"version": 1, "tensors": {"w": {"shape": [1] * 1_000_000, "dtype": LONG, "checksum": "0"}}},
        {"version": 1, "tensors": {"w": {"shape": [1], "dtype": [LONG], "checksum": "0"}}},
        {"version": 1, "checksum_name": LONG},
    ],
)
def test_a_manifest_with_long_names(folder: Path, manifest: dict[str, Any]) -> None:
    empty = {"tensors": {}, "objects": {}, "facts": {}, "checksum_name": "x"}
    (folder / "manifest.json").write_text(json.dumps(empty | manifest))
    refused(lambda: CheckpointFolder(folder), "manifest.json")
    assert len(str(verify(folder))) < 20_000


def test_numbers_in_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python reads no more than 4,300 digits; a key has no more than 4,096."""
    key = "9" * 4000

    def name(found: Metadata) -> None:
        found.state_dict_metadata[key] = found.state_dict_metadata[STEP]
        found.storage_data[MetadataIndex(key)] = found.storage_data[MetadataIndex(STEP)]

    hostile.edit_metadata(folder, name)
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    assert main(["checkpoint", "diff", str(folder), str(folder)]) == 0
    key = "9" * 5000
    hostile.edit_metadata(folder, name)
    capsys.readouterr()
    for words in (["inspect", str(folder)], ["diff", str(folder), str(folder)]):
        assert main(["checkpoint", *words]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "a key of 5000 characters" in told


def test_what_nests_too_deep_to_be_shown_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile.plant(folder, STEP, hostile.archive_of(hostile.whole(b"N" + b"\x85" * 100_000)))
    assert main(["checkpoint", "show", str(folder), STEP]) == 2
    assert capsys.readouterr().err == "error: what it holds nests too deep for this\n"


def test_an_error_of_a_checkpoint_keeps_begin_and_end() -> None:
    told = str(CheckpointError(f"begin {LONG} end"))
    assert len(told) < LONGEST_MESSAGE
    assert told.startswith("begin nnn")
    assert told.endswith("nnn end")
