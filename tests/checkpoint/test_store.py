"""The folder of a run: what is found, refused and kept, ranks that meet different things, and new folders."""

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.checkpoint import store
from megatron_fsdp.checkpoint.store import (
    CLAIM,
    POINTER,
    CheckpointStore,
    FileOps,
    new_folder,
    new_shared_folder,
    replace_text,
    require_apart,
    to_prune,
)
from megatron_fsdp.errors import CheckpointError, ConfigurationError, RankError
from tests.support.on_ranks import on_ranks, refusal


def fill(folder: Path) -> None:
    (folder / ".metadata").write_text("whole")


def listed(root: Path) -> list[str]:
    """The names in a folder, but for the file that is locked."""
    return sorted(path.name for path in root.iterdir() if path.name != CLAIM)


def write_each(store: CheckpointStore, *iterations: int) -> None:
    for iteration in iterations:
        store.write(iteration, fill)


# ---- finding --------------------------------------------------------------------------------------------------------


def test_a_run_is_laid_out_as_megatron_does(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "runs" / "a")
    assert store.latest() is None
    assert store.iterations() == []
    assert store.write(10, fill) == tmp_path / "runs" / "a" / "iter_0000010"
    write_each(store, 12_345_678)
    assert listed(store.root) == ["iter_0000010", "iter_12345678", POINTER]
    assert (store.root / POINTER).read_text() == "12345678"
    assert store.iterations() == [10, 12_345_678]
    assert store.latest() == store.resolve() == store.resolve(12_345_678) == store.root / "iter_12345678"
    assert store.resolve(10) == store.path_of(10) == store.root / "iter_0000010"


def test_what_does_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_each(store, 10)
    for name in ("iter_20", "iter_0000030", "iter_00000040", "iter_0000050x", ".iter_0000060.partial-1-1", "release"):
        (tmp_path / name).mkdir()
    for name in ("iter_20", "iter_00000040", "iter_0000050x", ".iter_0000060.partial-1-1"):
        fill(tmp_path / name)
    assert store.iterations() == [10]
    with pytest.raises(CheckpointError, match=r"iter_0000030 is not whole: it has no \.metadata; whole ones .*: 10"):
        store.resolve(30)
    with pytest.raises(CheckpointError, match=r"iter_0000020 does not exist; whole ones .*: 10"):
        store.resolve(20)


def test_release_and_hand_written_pointers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_each(store, 10, 20)
    (tmp_path / POINTER).write_text("  10\n")
    assert store.latest() == store.path_of(10)
    (tmp_path / POINTER).write_text("release\n")
    with pytest.raises(CheckpointError, match=r"says release, but there is no whole .* 10, 20; ask for one"):
        store.latest()
    (tmp_path / "release").mkdir()
    fill(tmp_path / "release")
    assert store.latest() == store.resolve() == tmp_path / "release"
    (tmp_path / POINTER).unlink()
    assert store.latest() == store.path_of(20)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 8, b"1e3", b"ten", b"-5", b"1_000", b"10 20", b"\xff\xfe\x00", "\u0661\u0662".encode(), b"9" * 5000],
)
def test_garbage_in_the_pointer_is_named(tmp_path: Path, content: bytes) -> None:
    store = CheckpointStore(tmp_path)
    write_each(store, 10)
    (tmp_path / POINTER).write_bytes(content)
    for look in (store.latest, store.resolve):
        with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration\.txt says b.* whole ones .*: 10"):
            look()
    assert store.resolve(10) == store.path_of(10)
    write_each(store, 20)
    assert store.latest() == store.path_of(20)


def test_wrong_folders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere, which does not exist; give the folder of"):
        CheckpointStore(tmp_path / "nowhere").resolve()
    with pytest.raises(CheckpointError, match=r"no checkpoint in \S+; give the folder of a run"):
        CheckpointStore(tmp_path).resolve()
    store = CheckpointStore(tmp_path)
    write_each(store, 10)
    with pytest.raises(CheckpointError, match=r"iter_0000010 is a checkpoint; give the folder of the run, \S+, and"):
        CheckpointStore(store.path_of(10)).latest()
    (tmp_path / "plain").mkdir()
    fill(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="plain is a checkpoint, and not the folder of a run"):
        CheckpointStore(tmp_path / "plain").resolve(10)
    with pytest.raises(CheckpointError, match="is a file; give the folder of a run"):
        CheckpointStore(tmp_path / POINTER).latest()
    (tmp_path / POINTER).write_text("30")
    with pytest.raises(CheckpointError, match=r"says 30, but there is no whole checkpoint of that name; .*: 10; ask"):
        store.latest()


@pytest.mark.parametrize("iteration", [-1, 1.0, True, "10", None, 10**18])
def test_what_is_no_iteration_is_refused(tmp_path: Path, iteration: object) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(ConfigurationError, match=r"iteration=.*give a whole number from 0"):
        store.write(iteration, fill)  # type: ignore[arg-type]
    if iteration is not None:
        with pytest.raises(ConfigurationError, match="give a whole number from 0"):
            store.resolve(iteration)  # type: ignore[arg-type]
    assert listed(tmp_path) == []


# ---- keeping --------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.integers(1, 5))
def test_pruning_keeps_the_newest_up_to_the_pointer_and_all_beyond(there: set[int], pointed: int, keep: int) -> None:
    gone = to_prune(there, pointed, keep)
    kept = (there | {pointed}) - set(gone)
    assert pointed in kept
    assert {iteration for iteration in there if iteration > pointed} <= kept
    assert (
        sorted(iteration for iteration in kept if iteration <= pointed)
        == sorted(iteration for iteration in there | {pointed} if iteration <= pointed)[-keep:]
    )
    assert to_prune(there, pointed, None) == []


def test_old_checkpoints_go_and_those_of_a_later_time_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    (tmp_path / "iter_0000001").mkdir()  # not whole: not ours to delete
    write_each(store, 10, 20, 30, 40)
    assert store.iterations() == [30, 40]
    write_each(store, 35, 36)
    assert store.iterations() == [35, 36, 40]
    assert store.latest() == store.path_of(36)
    assert (tmp_path / "iter_0000001").is_dir()


class CannotRemove(FileOps):
    def remove(self, path: Path) -> None:
        raise PermissionError(errno.EACCES, f"not allowed to remove {path.name}")


def test_what_cannot_be_deleted_is_a_warning_and_is_deleted_later(tmp_path: Path) -> None:
    stubborn = CheckpointStore(tmp_path, keep_last=1, ops=CannotRemove())
    write_each(stubborn, 10)
    with pytest.warns(RuntimeWarning, match="iter_0000010 could not be deleted .PermissionError"):
        stubborn.write(20, fill)
    assert stubborn.iterations() == [20]
    assert len(listed(tmp_path)) == 3
    write_each(CheckpointStore(tmp_path, keep_last=1), 30)
    assert listed(tmp_path) == ["iter_0000030", POINTER]


# ---- saving ---------------------------------------------------------------------------------------------------------


def test_an_iteration_is_not_overwritten_unasked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_each(store, 10, 20)
    called: list[Path] = []
    for iteration in (10, 20):
        with pytest.raises(CheckpointError, match="exists; pass overwrite=True to replace it, or save another"):
            store.write(iteration, called.append)
    (tmp_path / "iter_0000030").mkdir()
    with pytest.raises(CheckpointError, match=r"iter_0000030 exists, without a \.metadata; pass overwrite=True"):
        store.write(30, called.append)
    assert called == []
    assert store.latest() == store.path_of(20)
    store.write(10, lambda folder: (folder / ".metadata").write_text("again"), overwrite=True)
    assert (store.resolve() / ".metadata").read_text() == "again"
    assert store.latest() == store.path_of(10)
    assert len(listed(tmp_path)) == 4


def test_what_holds_no_metadata_is_not_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write_each(store, 10)
    with pytest.raises(CheckpointError, match=r"the writer has left no \.metadata in"):
        store.write(20, lambda folder: (folder / "data").write_text("x"))
    assert listed(tmp_path) == ["iter_0000010", POINTER]


def test_two_runs_that_save_one_iteration_at_once_do_not_replace_each_other(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "first").touch()
        CheckpointStore(tmp_path).write(3, fill)
        fill(folder)

    with pytest.raises(CheckpointError, match=r"another process has saved .*iter_0000003 meanwhile"):
        CheckpointStore(tmp_path).write(3, write)
    assert [path.name for path in (tmp_path / "iter_0000003").iterdir()] == [".metadata"]
    assert listed(tmp_path) == ["iter_0000003", POINTER]


# ---- ranks ----------------------------------------------------------------------------------------------------------


def told(act: Callable[[], object]) -> str:
    """The message of an error, the same on both ranks."""
    return refusal(act, error=(CheckpointError, ConfigurationError))


def rank_file(folder: Path) -> None:
    for number in range(2):
        (folder / f"part{2 * dist.get_rank() + number}").write_text("data")
    if dist.get_rank() == 1:
        fill(folder)


def full_on_rank_1(folder: Path) -> None:
    rank_file(folder)
    if dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, "No space left on device")


class CannotSync(FileOps):
    def sync(self, path: Path) -> None:
        raise OSError(errno.EIO, f"cannot sync {path.name}")


class Unwritable(dcp.FileSystemWriter):
    def write_data(self, *args: object) -> object:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(*args)  # type: ignore[arg-type]


@on_ranks(2)
def test_errors_of_any_rank_are_errors_of_all_and_nothing_is_published(tmp_path: Path) -> None:
    root, rank = tmp_path / "run", dist.get_rank()
    store = CheckpointStore(root)
    store.write(10, rank_file)
    assert listed(store.resolve()) == [".metadata", "part0", "part1", "part2", "part3"]
    full = f"saving {root}/iter_0000020 failed (rank 1: OSError: [Errno 28] No space left on device)"
    assert told(lambda: store.write(20, full_on_rank_1)) == full
    state = {"weight": torch.arange(8.0), f"of rank {rank}": torch.full((3,), float(rank))}
    assert told(lambda: store.write(20, lambda folder: dcp.save(state, storage_writer=Unwritable(folder)))) == full
    store.write(15, lambda folder: dcp.save(state, checkpoint_id=folder))
    loaded = {"of rank 1": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=store.resolve(15))
    assert loaded["of rank 1"].tolist() == [1.0, 1.0, 1.0]
    without_sync = CheckpointStore(root, ops=CannotSync())
    assert "failed (OSError: [Errno 5] cannot sync" in told(lambda: without_sync.write(20, rank_file))
    assert "exists; pass overwrite=True" in told(lambda: store.write(10, rank_file))
    in_the_way, mine = root / POINTER if rank == 0 else root, root / f"rank{rank}"
    assert "NotADirectoryError" in told(lambda: CheckpointStore(in_the_way).write(20, rank_file))
    apart = told(lambda: CheckpointStore(mine, patience_s=0.2).write(20, rank_file))
    saving = f"saving {root}/rank0/iter_0000020 failed (rank 1: CheckpointError: this rank does not see "
    assert apart.startswith(saving)
    assert apart.endswith("; save to a folder that all ranks share)")
    assert "iter_0000020 does not exist; whole ones" in told(lambda: store.resolve(20))
    # Rank 1 looks elsewhere, and still hears what rank 0 has found.
    elsewhere = CheckpointStore(root if rank == 0 else mine)
    assert elsewhere.latest() == elsewhere.path_of(15)
    assert elsewhere.iterations() == [10, 15]
    dist.barrier()
    assert listed(root) == ["iter_0000010", "iter_0000015", POINTER, "rank0"]


# ---- new folders and files -------------------------------------------------------------------------------------------


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
