"""Checkpoints that cannot be written, and checkpoints that were damaged since."""

import contextlib
import errno
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_fsdp.checkpoint import checkpointer
from tests.conftest import RunRanks
from tests.support.train_program import by_step, differences, metrics, refusal, train
from tests.train.test_resume import NUMBERS, POINTER, after_restart, saved


def train_on_a_full_disk(full: tuple[int, ...], *options: str) -> str:
    """A run whose saves of these numbers, counted from 0, find no room: what it shows, and its end."""
    module: Any = checkpointer
    write_state, numbers = module.write_state, itertools.count()

    def write(*given: Any, **options: Any) -> None:
        if next(numbers) in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_state(*given, **options)

    with mock.patch.object(module, "write_state", write), contextlib.redirect_stdout(io.StringIO()) as shown:
        told = refusal(*options)
    return " ".join(f"{shown.getvalue()} END {told}".split())


def test_a_save_that_fails_is_told_and_training_goes_on(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    options = (*data, "--save", str(folder), "--save-interval", "2", "--max-failed-saves", "2", "--async-save")
    told = run_ranks(2, train_on_a_full_disk, (1, 2), *options, "--out", str(tmp_path / "out"))
    assert "No space left on device" in told[0]
    assert "2 of at most 2 saves in a row failed; training goes on" in told[0]
    assert told[0].endswith(" END it went well")
    assert len(by_step(tmp_path / "out", "loss")) == 8
    assert saved(folder) == ["iter_0000002", "iter_0000008"]
    assert [path.name for path in folder.iterdir() if path.name.startswith((".iter_", ".latest_"))] == []


@pytest.mark.full
def test_one_save_too_many_that_fails_ends_the_run_and_the_last_one_always(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    options = (*data, "--save", str(folder), "--save-interval", "2", "--max-failed-saves", "1")
    told = run_ranks(2, train_on_a_full_disk, (1, 2), *options, "--out", str(tmp_path / "0"))
    assert told[0].rpartition("END ")[2] == told[1].rpartition("END ")[2]
    assert "END NotSavedError: " in told[0]
    assert "2 saves in a row failed, and --max-failed-saves is 1; what was saved before is as it was" in told[0]
    assert saved(folder) == ["iter_0000002"]
    options = (*data, "--save", str(tmp_path / "last"), "--save-interval", "4", "--async-save")
    told = run_ranks(2, train_on_a_full_disk, (1,), *options, "--out", str(tmp_path / "1"))
    assert "END NotSavedError: the last save failed: " in told[1]
    assert saved(tmp_path / "last") == ["iter_0000004"]


def flip(folder: Path) -> None:
    """Change one bit in the values of a checkpoint's largest tensor; between its tensors it would change nothing."""
    stored = FileSystemReader(folder).read_metadata().storage_data
    largest = max(stored.values(), key=lambda item: item.length)
    file = folder / largest.relative_path
    content = bytearray(file.read_bytes())
    content[largest.offset + largest.length // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.full
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    options = (*data, "--save", str(folder), "--save-interval", "2", "--out", str(tmp_path / "out"))
    run_ranks(2, train, *data, "--save", str(tmp_path / "all"), "--out", str(tmp_path / "whole"))
    run_ranks(2, after_restart, *options, "--exit-interval", "6")
    flip(folder / "iter_0000006")
    named = (*data, "--load", str(folder / "iter_0000006"))
    (refused, _) = run_ranks(2, refusal, *named, "--out", str(tmp_path / "refused"))
    assert refused.startswith(f"CheckpointError: loading {folder}/iter_0000006 failed (rank")
    assert " is damaged: " in refused
    run_ranks(2, train, *named, "--no-verify-integrity", "--out", str(tmp_path / "trusting"))
    next((folder / "iter_0000004").glob("*.distcp")).unlink()
    told = run_ranks(2, after_restart, *options)[0]
    for step in (6, 4):
        assert f"WARNING: {folder}/iter_000000{step} cannot be used, going back to the one before" in told
    assert f"loaded {folder}/iter_0000002" in told
    assert [record["step"] for record in metrics(tmp_path / "out")][-6:] == [3, 4, 5, 6, 7, 8]
    assert by_step(tmp_path / "out", *NUMBERS) == by_step(tmp_path / "whole", *NUMBERS)
    assert differences(folder / "iter_0000008", tmp_path / "all" / "iter_0000008") == []
    (folder / POINTER).write_text("77")
    told = run_ranks(2, after_restart, *options, "--train-iters", "9")[0]
    assert f"WARNING: {folder} lacks the checkpoint 77" in told
    assert f"loaded {folder}/iter_0000008" in told


def refusal_after_restart(*options: str) -> str:
    return refusal(*options, restarts=1)


def unreadable(folder: Path) -> None:
    """Damage what says where tensors lie."""
    (folder / ".metadata").write_bytes(b"\x80\x04garbage")


@pytest.mark.full(short=["flip"])
@pytest.mark.parametrize("damage", [unreadable, flip])
def test_where_no_checkpoint_is_sound_nothing_is_begun_anew(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "saved"
    options = (*data, "--save", str(folder), "--out", str(tmp_path / "out"))
    run_ranks(2, train, *options, "--train-iters", "2")
    damage(folder / "iter_0000002")
    told = run_ranks(2, refusal_after_restart, *options)
    assert told[0] == told[1]
    assert told[0].startswith(f"CheckpointError: no checkpoint in {folder} can be used, and beginning anew would")
    assert saved(folder) == ["iter_0000002"]
