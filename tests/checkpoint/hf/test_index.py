"""Which files a folder has, and that its index and its files say the same."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_fsdp.checkpoint.hf.index import INDEX_FILE, MODEL_FILE, open_folder
from megatron_fsdp.errors import CheckpointError

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


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"z": torch.ones(3)}, tmp_path / MODEL_FILE)
    assert set(open_folder(tmp_path).tensors) == {"z"}


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
    "an absolute path": (_index({"a": "/etc/x.safetensors"}), "'a' is in '/etc/x.safetensors'"),
    "a pickle": (_index({"a": "pytorch_model.bin"}), "'a' is in 'pytorch_model.bin'"),
    "a file as a number": (_index({"a": 3}), "'a' is in 3"),
    "no map": (_index(["a"]), "no weight_map"),
    "an empty map": (_index({}), "no weight_map"),
    "no JSON": (lambda folder: (folder / INDEX_FILE).write_text("{") and None, "cannot be read as JSON"),
    "nested deeply": (
        lambda folder: (folder / INDEX_FILE).write_text("[" * 200_000) and None,
        "cannot be read as JSON",
    ),
    "a missing file": (
        lambda folder: (folder / SECOND).unlink(),
        f"{SECOND} is missing; {INDEX_FILE} names it for 'c'",
    ),
    "a cut file": (_cut, "'c' ends at byte"),
    "a tensor that its file lacks": (
        _index({"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}),
        f"'d' is in {{folder}}/{SECOND}",
    ),
    "a tensor that the index lacks": (
        _index({"a": FIRST, "c": SECOND}),
        "'b', and model.safetensors.index.json does not",
    ),
    "a tensor in another file": (
        _index({"a": SECOND, "b": FIRST, "c": SECOND}),
        f"'a', and {INDEX_FILE} says it is in {SECOND}",
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
    assert said.format(folder=folder) in str(raised.value)


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
    files.check_here([FIRST, SECOND])
    (tmp_path / SECOND).write_bytes(b"x")
    files.check_here([FIRST])
    with pytest.raises(CheckpointError, match=f"{SECOND} has 1 bytes, and had"):
        files.check_here([FIRST, SECOND])
    (tmp_path / FIRST).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST} is not there"):
        files.check_here([FIRST])
