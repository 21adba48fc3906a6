"""Arguments and files of a wrong kind: refused in words."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from megatron_fsdp.errors import CheckpointError, ConfigurationError


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("max_shard_bytes", "5GB", "max_shard_bytes='5GB' is a str; give a whole number of bytes"),
        ("max_shard_bytes", 1.5, "max_shard_bytes=1.5 is a float"),
        ("max_shard_bytes", True, "max_shard_bytes=True is a bool"),
        ("dtype", "bfloat16", "dtype='bfloat16' is a str; give a torch.dtype"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(tmp_path: Path, argument: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        save_hf(nn.Linear(1, 1), tmp_path / "out", **{argument: value})
    assert said in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    makers = (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("nowhere"))
    for make, remove in zip(makers, (path.rmdir, path.unlink, path.unlink), strict=True):
        make()
        with pytest.raises(CheckpointError, match=r"is no file \(but a folder, a pipe or a link to nothing\)"):
            load_hf(nn.Linear(1, 1), tmp_path)
        remove()


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(CheckpointError, match="is a link, which would be replaced"):
        save_hf(nn.Linear(1, 1, dtype=torch.float32), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
