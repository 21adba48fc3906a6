"""New folders and files appear whole or not at all, and never in the place of something that is in use."""

import contextlib
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_fsdp.checkpoint import store
from megatron_fsdp.checkpoint.store import new_folder, new_shared_folder, replace_text, require_apart
from megatron_fsdp.errors import CheckpointError, RankError


def test_what_is_in_use_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, full, link, file = (tmp_path / name for name in ("source", "full", "link", "file"))
    for folder in (source, full / "mine", tmp_path / "empty"):
        folder.mkdir(parents=True)
    link.symlink_to("full")
    file.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path / "empty")
    refusals = {
        Path(): "is the current folder",
        full: "exists already and is not empty",
        link: "is a link, which would be replaced",
        file: "is no folder",
        file / "below": r"cannot be made \(Not a directory\)",
    }
    for target, told in refusals.items():
        with pytest.raises(CheckpointError, match=told), new_folder(target):
            pytest.fail("not refused")
    for target, told in ((source, "is the checkpoint that is read"), (source / "a" / "b", "is inside .*, which is")):
        with pytest.raises(CheckpointError, match=told):
            require_apart(target, source)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_left_of_what_ends_in_an_error(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError), new_folder(tmp_path / "out") as temporary:
        (temporary / "part").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_is_complete_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty one may be there
    with new_folder(tmp_path / "out") as temporary:
        (temporary / "part").write_text("a")
        assert not (tmp_path / "out" / "part").exists()
    replace_text(tmp_path / "file", "b")
    replace_text(tmp_path / "file", "c")
    assert {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"part": "a", "file": "c"}
    assert len(list(tmp_path.iterdir())) == 2


def test_an_error_in_a_shared_folder_stays_what_it_was_where_ranks_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken_down(*_: object) -> NoReturn:
        raise RankError("torch.distributed was taken down")

    def fail() -> None:
        with new_shared_folder(tmp_path / "out", None):
            monkeypatch.setattr(store, "rank_of", taken_down)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
