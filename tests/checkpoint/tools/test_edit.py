"""Editing: what happens to keys is planned purely; the data really come along."""

import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.manifest import Manifest
from megatron_fsdp.checkpoint.tools.diff import diff
from megatron_fsdp.checkpoint.tools.edit import Kept, edit, edited_path, edited_paths, parse_operation, plan_edit
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.tools import builders


def planned(keys: list[str], *operations: str) -> dict[str, str]:
    return {
        entry.source: entry.key
        for entry in plan_edit(dict.fromkeys(keys, torch.float32), [parse_operation(text) for text in operations])
    }


def test_operations_follow_one_another() -> None:
    keys = ["model.a", "model.b", "opt.a"]
    assert planned(keys, "remove ^opt", r"rename ^model\. ''", "rename b$ c") == {"model.a": "a", "model.b": "c"}
    assert planned(keys, r"rename ^(\w+)\.(\w)$ \2.\1") == {
        "model.a": "a.model",
        "model.b": "b.model",
        "opt.a": "a.opt",
    }


@pytest.mark.parametrize(
    ("operations", "problem"),
    [
        (["remove nothing"], "matches no key"),
        (["remove a", "remove a"], "matches no key"),
        (["rename b a"], "would store a and b as a"),
        (["rename . x"], "would store"),
        (["remove ."], "remove every key"),
        (["rename a ''"], "leaves nothing of the key a"),
        (["cast a int3"], "no dtype of torch"),
        (["cast o float16"], "matches no tensor's key"),
        (["remove ("], "not a regular expression"),
        ([r"rename a \3"], "replacement is wrong"),
        (["remove"], "is not an operation"),
        (["drop a"], "is not an operation"),
        (["remove a b"], "is not an operation"),
        (["rename 'a b"], "cannot be read"),
        ([], "nothing to do"),
    ],
)
def test_operations_that_cannot_be_meant_are_refused(operations: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plan_edit({"a": torch.float32, "b": torch.float32, "o": None}, [parse_operation(text) for text in operations])


KEYS = st.lists(st.from_regex(r"\A[ab](\.[abc0]){0,3}\Z"), min_size=1, max_size=8, unique=True)


@given(KEYS, st.sampled_from("abc"), st.sampled_from("abcd"))
def test_renamed_keys_are_distinct_or_the_edit_is_refused(keys: list[str], old: str, new: str) -> None:
    expected = [key.replace(old, new) for key in keys]
    try:
        found = planned(keys, f"rename {old} {new}")
    except ConfigurationError:
        assert all(old not in key for key in keys) or len(set(expected)) < len(keys)
    else:
        assert list(found.values()) == expected
        assert len(set(expected)) == len(keys)


@pytest.mark.parametrize(
    ("path", "key", "expected"),
    [
        (("model", "layers.0.weight"), "model.blocks.0.weight", ("model", "blocks.0.weight")),
        (("optimizer", "state", "w", "exp_avg"), "optimizer.state.v.exp_avg", ("optimizer", "state", "v", "exp_avg")),
        (("model", "a.b"), "a.b", ("a.b",)),
        (("a",), "model.a", ("model.a",)),
        (("list", 0), "list.3", ("list", 3)),
        (("list", 0), "list.x", ("list", "x")),
        (("a", "b"), "a.b", ("a", "b")),
    ],
)
def test_paths_of_renamed_keys(path: tuple[str | int, ...], key: str, expected: tuple[str | int, ...]) -> None:
    assert edited_path(path, Kept(".".join(map(str, path)), key, None)) == expected


@given(st.lists(st.sampled_from(["x", "y.z", "0"]), min_size=1, max_size=4), st.sampled_from(["x", "y", "z", "0"]))
def test_paths_always_join_to_their_keys(parts: list[str], old: str) -> None:
    path: tuple[str | int, ...] = tuple(parts)
    key = ".".join(parts)
    renamed = key.replace(old, "new", 1)
    assert ".".join(map(str, edited_path(path, Kept(key, renamed, None)))) == renamed


def test_a_key_cannot_be_an_entry_and_a_group() -> None:
    kept = [Kept("a.b", "a", None), Kept("a.c", "a.c", None)]
    with pytest.raises(ConfigurationError, match=r"also the group that holds a\.c"):
        edited_paths({"a.b": ("a", "b"), "a.c": ("a", "c")}, kept)
    mixed = [Kept("l.0", "l.x", None), Kept("l.1", "l.1", None)]
    assert edited_paths({"l.0": ("l", 0), "l.1": ("l", 1)}, mixed) == {"l.x": ("l", "x"), "l.1": ("l", "1")}


def nested(path: Path) -> dict[str, Any]:
    """What torch itself makes of a folder without knowing its content."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def test_an_edited_checkpoint_loads(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    state = {
        "model": {"layers.0.w": weight, "layers.0.b": torch.ones(6), "old": torch.zeros(1)},
        "step": 5,
        "list": [torch.tensor(1.0), torch.tensor(2.0)],
        "empty": torch.empty(0, 3),
    }
    folder = builders.save(state, tmp_path / "a")
    operations = ["remove old", r"rename layers\.(\d+) blocks.\1", r"cast \.w$ bfloat16", "rename ^step$ iteration"]
    report = edit(folder, tmp_path / "b", [parse_operation(text) for text in operations])
    assert (report.removed, report.renamed, report.cast) == (("model.old",), 3, 1)
    wanted = {
        "model": {"blocks.0.w": torch.zeros(6, 4, dtype=torch.bfloat16), "blocks.0.b": torch.zeros(6)},
        "iteration": 0,
    }
    loaded = builders.dcp_load(wanted, tmp_path / "b")
    assert torch.equal(loaded["model"]["blocks.0.w"], weight.bfloat16())
    assert torch.equal(loaded["model"]["blocks.0.b"], torch.ones(6))
    assert loaded["iteration"] == 5
    unknown = nested(tmp_path / "b")
    assert list(unknown["model"]) == ["blocks.0.b", "blocks.0.w"] or list(unknown["model"]) == [
        "blocks.0.w",
        "blocks.0.b",
    ]
    assert torch.equal(unknown["list"][1], torch.tensor(2.0))
    assert unknown["empty"].shape == (0, 3)
    manifest = Manifest.read(tmp_path / "b")
    assert manifest is not None
    assert manifest.tensors.keys() == CheckpointFolder(tmp_path / "b").tensors.keys()


def test_chunks_and_objects_come_along_as_they_are(tmp_path: Path) -> None:
    values = torch.randn(12, 15)
    boxes = builders.grid((12, 15), [5], [2, 8])
    folder = builders.save_cut({"w": (values, boxes)}, tmp_path / "a")
    edit(folder, tmp_path / "b", [parse_operation("rename w v")])
    assert [chunk.box for chunk in CheckpointFolder(tmp_path / "b").tensors["v"].chunks] == boxes
    edit(CheckpointFolder(tmp_path / "b"), tmp_path / "c", [parse_operation("rename v w")])
    assert diff(folder, CheckpointFolder(tmp_path / "c")).is_same


def test_an_edited_torch_dist_checkpoint_is_one_still(tmp_path: Path) -> None:
    folder = builders.save_torch_dist(tmp_path / "a", "G2")
    (folder.path / "tokenizer").mkdir()
    (folder.path / "tokenizer" / "vocab.txt").write_text("x")
    (folder.path / "integrity.json").write_text("{}")
    (folder.path / "link").symlink_to(tmp_path)
    report = edit(folder, tmp_path / "b", [parse_operation("remove ^optimizer")])
    assert report.copied_files == ("common.pt", "metadata.json", "tokenizer")
    assert report.dropped_files == ("integrity.json", "link")
    assert (tmp_path / "b" / "tokenizer" / "vocab.txt").read_text() == "x"
    found = CheckpointFolder(tmp_path / "b")
    assert not found.metadata.planner_data
    assert (tmp_path / "b" / "common.pt").read_bytes() == (folder.path / "common.pt").read_bytes()
    kept = diff(folder, found, pattern="^(?!optimizer)")
    assert kept.is_same
    assert kept.compared == 5  # common.pt too


def test_generation_1_cannot_be_edited(tmp_path: Path) -> None:
    folder = builders.save_torch_dist(tmp_path / "a", "G1")
    with pytest.raises(CheckpointError, match="convert it first"):
        edit(folder, tmp_path / "b", [parse_operation("remove embedding")])
    assert not (tmp_path / "b").exists()


def test_nothing_half_done_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builders.save({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "a")
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        edit(folder, full, [parse_operation("remove a")])
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        edit(folder, tmp_path / "b", [parse_operation("remove a")])
    assert len(calls) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "full"]
    assert (full / "x").read_text() == "mine"


def test_an_empty_folder_may_be_the_target(tmp_path: Path) -> None:
    folder = builders.save({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "b").mkdir()
    edit(folder, tmp_path / "b", [parse_operation("remove a")])
    assert list(CheckpointFolder(tmp_path / "b").tensors) == ["b"]
