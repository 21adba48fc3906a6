"""The trainer's checkpoints: a run in two parts equals a run in one, an interrupted run is kept, misuse is refused."""

import contextlib
import errno
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_fsdp.checkpoint import checkpointer
from megatron_fsdp.checkpoint.convert.groups import export_group_map_json
from megatron_fsdp.train.models.trained import Trained
from tests.conftest import RunRanks
from tests.support.train_program import (
    LIMIT_S,
    by_step,
    differences,
    environment,
    metrics,
    output_of,
    refusal,
    run,
    start,
    steps_done,
    torment,
    train,
    wait_for,
)

POINTER = "latest_checkpointed_iteration.txt"
NUMBERS = ("loss", "grad_norm", "learning_rate", "samples", "data_checksum")


def after_restart(*options: str) -> str:
    return output_of(*options, restarts=1)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("iter_*"))


@pytest.mark.full(short=["optim-saving1"])
@pytest.mark.parametrize(("strategy", "saving"), [("optim_grads_params", ("--async-save",)), ("optim", ())])
def test_a_run_in_two_parts_equals_a_run_in_one(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path, strategy: str, saving: tuple[str, ...]
) -> None:
    base = (*data, "--data-parallel-sharding-strategy", strategy, "--log-interval", "3")
    run_ranks(2, train, *base, "--out", str(tmp_path / "whole"), "--save", str(tmp_path / "all"))
    kept = ("--save", str(tmp_path / "saved"), "--save-interval", "2", "--keep-last", "2", *saving)
    dumping = ("--dump-param-to-param-group-map", str(tmp_path / "map"))
    run_ranks(2, train, *base, *kept, *dumping, "--exit-interval", "5", "--out", str(tmp_path / "first"))
    assert saved(tmp_path / "saved") == ["iter_0000004", "iter_0000005"]
    loading = ("--load", str(tmp_path / "saved"), "--verify-integrity")
    run_ranks(2, train, *base, *kept, *loading, "--out", str(tmp_path / "second"))
    first, second = by_step(tmp_path / "first", *NUMBERS), by_step(tmp_path / "second", *NUMBERS)
    assert (list(first), list(second)) == ([1, 2, 3, 4, 5], [6, 7, 8])
    assert first | second == by_step(tmp_path / "whole", *NUMBERS)
    assert differences(tmp_path / "saved" / "iter_0000008", tmp_path / "all" / "iter_0000008") == []
    assert metrics(tmp_path / "second")[0]["elapsed_s"] > metrics(tmp_path / "first")[-1]["elapsed_s"]
    assert saved(tmp_path / "saved") == ["iter_0000006", "iter_0000008"]
    groups = json.loads(export_group_map_json(tmp_path / "map").read_text())
    assert set(groups.values()) == {0, 1}  # with and without weight decay
    assert all((index == 1) == ("norm" in name or "embed" in name) for name, index in groups.items()), groups


def train_until_asked(*options: str) -> None:
    """A run that is asked to end before its fourth step, after which it does so."""
    update, steps = Trained.update, iter(range(1, 100))

    def asked(trained: Trained) -> None:
        update(trained)
        if next(steps) == 3:
            signal.raise_signal(signal.SIGUSR1)

    with mock.patch.object(Trained, "update", asked):
        train(*options)


@pytest.mark.full
def test_an_evaluation_that_was_due_is_made_up(run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path) -> None:
    base = (*data, "--eval-interval", "2")
    run_ranks(2, train, *base, "--out", str(tmp_path / "whole"))
    parts = (*base, *("--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")), "--out")
    run_ranks(2, train_until_asked, *parts, str(tmp_path / "parts"))
    assert list(by_step(tmp_path / "parts", "loss")) == [1, 2, 3, 4]
    run_ranks(2, train, *parts, str(tmp_path / "parts"))
    whole, found = ((tmp_path / name / "evaluations.jsonl").read_text() for name in ("whole", "parts"))
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [2, 4, 6, 8]
    assert found == whole


@pytest.mark.full
def test_a_folder_that_does_not_fit_is_refused(run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    short = (*data, "--train-iters", "2")
    # Not there yet: a run that is started again and again with the same options begins with the first step.
    same = ("--save", folder, "--load", folder, "--no-save-optim")
    run_ranks(2, train, *short, *same, "--out", str(tmp_path / "0"))
    (tmp_path / "file").touch()
    cases = {
        "CheckpointError: ": ("--load", str(tmp_path / "nowhere")),
        "has 2 steps already: give --train-iters above 2": ("--load", folder, "--no-load-optim"),
        "holds a checkpoint of step 2, and this run begins after step 0": ("--save", folder),
        "give --no-strict-fsdp-dtensor-load to load what fits, or --no-load-optim": ("--load", folder),
        "file cannot be written (File exists): give another folder": ("--save", str(tmp_path / "file")),
    }
    for number, (words, options) in enumerate(cases.items()):
        told = run_ranks(2, refusal, *short, *options, "--out", str(tmp_path / f"refused{number}"))
        assert words in told[0]
        assert told[0] == told[1]
        assert "strict=False" not in told[0]
        assert not list((tmp_path / f"refused{number}").glob("metrics*"))  # before the first step
    fitting = ("--load", folder, "--no-load-optim", "--no-load-rng", "--train-iters", "3")
    run_ranks(2, train, *data, *fitting, "--out", str(tmp_path / "1"))
    assert list(by_step(tmp_path / "1", "loss")) == [3]


@pytest.mark.full
def test_a_job_that_is_started_again_and_again_ends_well(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    base = (*data, "--train-iters", "4", "--save", str(folder), "--load", str(folder), "--save-interval", "2")
    left = folder / "iter_0000002"
    left.mkdir(parents=True)
    (left / "x").write_text("half a copy")
    run_ranks(2, train, *base, "--out", str(tmp_path / "0"))
    assert not (left / "x").exists()  # replaced by what the run has saved itself
    (folder / POINTER).write_text("2")  # as after a kill between the name of a checkpoint and the pointer
    run_ranks(2, train, *base, "--out", str(tmp_path / "1"))
    first, second = by_step(tmp_path / "0", *NUMBERS), by_step(tmp_path / "1", *NUMBERS)
    assert second == {step: first[step] for step in (3, 4)}
    assert (folder / POINTER).read_text().strip() == "4"
    told, _ = run_ranks(2, output_of, *base, "--out", str(tmp_path / "2"))
    assert "has all 4 steps: the training is done" in told
    assert not (tmp_path / "2" / "metrics.jsonl").exists()


@pytest.mark.full
def test_ranks_that_start_again_go_on_from_what_they_saved_and_not_from_what_they_loaded(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path
) -> None:
    base, folder = str(tmp_path / "base"), str(tmp_path / "saved")
    run_ranks(2, train, *data, "--train-iters", "2", "--save", base, "--out", str(tmp_path / "0"))
    tuning = (*data, "--load", base, "--finetune", "--save", folder, "--save-interval", "3")
    whole = (*data, "--load", base, "--finetune", "--save", str(tmp_path / "all"), "--out", str(tmp_path / "whole"))
    run_ranks(2, train, *whole)
    told, _ = run_ranks(2, after_restart, *tuning, "--exit-interval", "4", "--out", str(tmp_path / "1"))
    assert "holds no checkpoint yet" not in told  # nothing saved yet: it loads what it was told to load
    told, _ = run_ranks(2, after_restart, *tuning, "--out", str(tmp_path / "1"))
    assert "loaded" in told
    assert list(by_step(tmp_path / "1", "loss")) == list(range(1, 9))
    assert by_step(tmp_path / "1", *NUMBERS) == by_step(tmp_path / "whole", *NUMBERS)
    assert differences(tmp_path / "saved" / "iter_0000008", tmp_path / "all" / "iter_0000008") == []


@pytest.mark.full
def test_an_interrupted_run_is_saved_and_goes_on(run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path) -> None:
    folder, first = tmp_path / "saved", tmp_path / "first"
    same = (*data, "--lr-decay-iters", "4000", "--log-interval", "100000")
    process = start(
        *same,
        *("--save", str(folder), "--train-iters", "1000000", "--out", str(first), "--save-interval", "9"),
        env=environment(COLUMNS="1000"),
    )
    wait_for(lambda: steps_done(first) >= 9, process)
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (143, "stopped; what was written so far is kept\n")
    done = len(metrics(first))
    assert f"stopped and saved after {done} steps; --load {folder} continues from there" in " ".join(shown.split())
    assert (folder / POINTER).read_text().strip() == str(done)
    more = ("--train-iters", str(done + 3), "--save", str(tmp_path / "second"))
    shown, _ = run(*same, *more, "--load", str(folder), "--out", str(tmp_path / "second_out"))
    assert " 0 missing, 0 unexpected, 0 of another shape" in shown
    assert "random states: restored for every logical rank" in shown
    assert "not as it was saved" not in shown
    whole = (*same, "--train-iters", str(done + 3), "--out", str(tmp_path / "whole"))
    run_ranks(2, train, *whole)
    both = by_step(first, *NUMBERS) | by_step(tmp_path / "second_out", *NUMBERS)
    assert both == by_step(tmp_path / "whole", *NUMBERS)


# ---- ranks that are killed at random moments, also while they save --------------------------------------------------

ASYNC = ("--async-save",)
STAGES = ("--transformer-impl", "transformers", "--use-torch-fsdp2", "--pipeline-model-parallel-size", "2")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find ranks")
@pytest.mark.parametrize(
    ("seed", "steps", "kills", "more"),
    [(1, 100, 2, ()), (3, 12, 1, (*ASYNC, *STAGES, "--num-layers", "2"))],
    ids=["ranks", "stages"],
)
def test_a_run_whose_ranks_are_killed_equals_one_that_is_left_alone(
    run_ranks: RunRanks, data: tuple[str, str], tmp_path: Path, seed: int, steps: int, kills: int, more: tuple[str, ...]
) -> None:
    out, saved, quiet = tmp_path / "out", tmp_path / "saved", tmp_path / "quiet"
    options = (*data, *more, "--train-iters", str(steps), "--save-interval", str(min(10, steps // 3)))
    options = (*options, "--keep-last", "3")
    run_ranks(2, train, *options, "--save", str(quiet), "--out", str(tmp_path / "quiet_out"))
    program = start(*options, "--save", str(saved), "--out", str(out), "--max-restarts", str(kills))
    killed = torment(program, out, saved, seed=seed, kills=kills, during_saves=1)
    _, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors
    assert len(killed) == kills
    assert any(killed)
    assert by_step(out, *NUMBERS) == by_step(tmp_path / "quiet_out", *NUMBERS)
    assert list(by_step(out, "loss")) == list(range(1, steps + 1))
    assert differences(saved / f"iter_{steps:07}", quiet / f"iter_{steps:07}") == []
    assert sorted(path.name for path in saved.iterdir()) == sorted(path.name for path in quiet.iterdir())


# ---- checkpoints that cannot be written, and checkpoints that were damaged since -------------------------------------


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
