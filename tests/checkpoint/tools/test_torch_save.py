"""Checkpoints as torch.save files and back: bit-equal, nested as before, readable by torch's own safe loader."""

import argparse
import collections
import os
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.manifest import Manifest
from megatron_fsdp.checkpoint.torch_save import from_torch_save, to_torch_save
from megatron_fsdp.errors import CheckpointError
from tests.checkpoint.tools import builders
from tests.support import hostile


def many_kinds() -> dict[Any, Any]:
    weight = torch.randn(7, 5)
    return {
        "model": {
            "a.w": weight,
            "tied": weight,
            "bf16": torch.randn(3).bfloat16(),
            "f8": torch.randn(4).to(torch.float8_e4m3fn),
            "u32": torch.tensor([1, 2**32 - 1]).to(torch.uint32),
            "scalar": torch.tensor(3.5),
            "nothing": torch.empty(0, 4),
            "complex": torch.randn(3, dtype=torch.complex64).conj(),
            "transposed": torch.randn(4, 6).t(),
            "bool": torch.tensor([True, False]),
            "parameter": torch.nn.Parameter(torch.ones(2)).detach(),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(2, 2)}, 1: {}},
            "param_groups": [{"lr": 0.1, "params": [0, 1], "betas": (0.9, 0.95)}],
        },
        "list": [torch.ones(2), {"x": 1}, [], [torch.zeros(1)]],
        "empty": {},
        "none": None,
        "tuple": (torch.ones(2), 3),
        "ordered": collections.OrderedDict(a=1),
    }


def repacked(state: dict[Any, Any], path: Path) -> dict[Any, Any]:
    torch.save(state, path / "in.pt")
    from_torch_save(path / "in.pt", path / "dcp", chunk_bytes=40)
    to_torch_save(CheckpointFolder(path / "dcp"), path / "out.pt")
    return torch.load(path / "out.pt", weights_only=True)


def test_there_and_back_changes_what_torch_changes(tmp_path: Path) -> None:
    """Keys that are numbers become text, and containers without elements are left out, as by torch's own converters."""
    state = many_kinds()
    back = repacked(state, tmp_path)
    state["model"]["complex"] = state["model"]["complex"].resolve_conj()
    state["optimizer"]["state"] = {"0": state["optimizer"]["state"][0]}
    del state["empty"]
    assert builders.is_same(state, back)
    assert list(back["model"]) == list(state["model"])
    folder = CheckpointFolder(tmp_path / "dcp")
    assert "optimizer.state.0.exp_avg" in folder.tensors
    assert len(folder.tensors["model.a.w"].chunks) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "in.pt", "out.pt"]


def test_tensors_of_the_file_do_not_share_storage(tmp_path: Path) -> None:
    back = repacked({"a": torch.zeros(100), "b": torch.ones(3)}, tmp_path)
    assert [value.untyped_storage().nbytes() for value in back.values()] == [400, 12]


def test_tied_tensors_are_written_in_full_and_named(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    torch.save({"a": weight, "b": weight, "c": weight[1:], "d": torch.zeros(2)}, tmp_path / "in.pt")
    report = from_torch_save(tmp_path / "in.pt", tmp_path / "dcp")
    assert report.notes == ("a, b, c share memory; each is written in full",)
    loaded = builders.dcp_load(
        {"a": torch.zeros(4, 3), "b": torch.zeros(4, 3), "c": torch.zeros(3, 3)}, tmp_path / "dcp"
    )
    assert torch.equal(loaded["a"], weight)
    assert torch.equal(loaded["b"], weight)
    assert torch.equal(loaded["c"], weight[1:])


def test_the_folder_has_a_manifest(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(50, 3), "o": 1}, tmp_path / "in.pt")
    from_torch_save(tmp_path / "in.pt", tmp_path / "one")
    from_torch_save(tmp_path / "in.pt", tmp_path / "many", chunk_bytes=60)
    one, many = Manifest.read(tmp_path / "one"), Manifest.read(tmp_path / "many")
    assert one is not None
    assert many is not None
    assert one.tensors == many.tensors
    assert one.objects == many.objects
    assert len(one.tensors) == len(one.objects) == 1


def test_entries_that_would_have_one_key_are_refused(tmp_path: Path) -> None:
    for state in ({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, {1: {"a": 1}, "1": {"a": 2}}):
        torch.save(state, tmp_path / "in.pt")
        with pytest.raises(CheckpointError, match="rename one"):
            from_torch_save(tmp_path / "in.pt", tmp_path / "dcp")
        assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize(
    "paths", [{"a": ("x",), "b": ("x", "y")}, {"a": ("x", 0), "b": ("x", "y")}, {"a": ("x",), "b": ("x",)}]
)
def test_paths_that_contradict_are_refused(tmp_path: Path, paths: dict[str, Any]) -> None:
    builders.save({"a": 1, "b": 2, "w": torch.zeros(1)}, tmp_path / "dcp")
    hostile.edit_metadata(tmp_path / "dcp", lambda found: found.planner_data.update(paths))
    with pytest.raises(CheckpointError, match="the metadata contradict themselves"):
        to_torch_save(CheckpointFolder(tmp_path / "dcp"), tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_objects_become_what_the_safe_loader_takes(tmp_path: Path) -> None:
    state = {
        "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("x"), names=frozenset({"a"})),
        "rng": ("MT19937", np.arange(3, dtype=np.uint32), np.float64(1.5)),
        "dtype": torch.float32,
    }
    builders.save(state, tmp_path / "dcp")
    report = to_torch_save(CheckpointFolder(tmp_path / "dcp"), tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["args"] == {"lr": 0.1, "path": "x", "names": {"a"}}
    assert found["rng"][1].tolist() == [0, 1, 2]
    assert type(found["rng"][2]) is float
    assert found["rng"][2] == 1.5
    assert found["dtype"] is torch.float32
    assert "args: Namespace became dict" in report.notes
    assert "rng: ndarray became Tensor" in report.notes


def test_torch_dist_is_written_flat(tmp_path: Path) -> None:
    folder = builders.save_torch_dist(tmp_path / "dcp", "G2")
    report = to_torch_save(folder, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.keys() == folder.tensors.keys() | folder.objects.keys()
    assert torch.equal(found["decoder.final_layernorm.weight"], folder.read_tensor("decoder.final_layernorm.weight"))
    assert "common.pt is not part of it" in report.notes[-1]


class Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_planted_pickle_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1), "x": Planted(tmp_path / "owned")}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"asks to import (posix|nt|os)\.system"):
        from_torch_save(tmp_path / "in.pt", tmp_path / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt"]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.pt").write_bytes(b"not a file of torch")
    with pytest.raises(CheckpointError, match="not an archive"):
        from_torch_save(tmp_path / "in.pt", tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="cannot be read"):
        from_torch_save(tmp_path / "none.pt", tmp_path / "dcp")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        from_torch_save(tmp_path / "list.pt", tmp_path / "dcp")
    torch.save({"w": torch.zeros(1000)}, tmp_path / "cut.pt")
    raw = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.pt"):
        from_torch_save(tmp_path / "cut.pt", tmp_path / "dcp")
    folder = builders.save({"w": torch.zeros(1)}, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="exists already"):
        to_torch_save(folder, tmp_path / "list.pt")
