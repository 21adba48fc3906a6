"""The trainer's checkpoints: a run in two parts equals a run in one, an interrupted run is kept, misuse is refused."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_fsdp.train.arguments import Arguments, resolve_settings
from megatron_fsdp.train.checkpoint_arguments import CheckpointArguments
from megatron_fsdp.train.job import run_job
from megatron_fsdp.train.metrics import read_records

from megatron_fsdp.checkpoint.convert.group_map import export_group_map_json
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.train.checkpoints import in_options
from tests.conftest import RunRanks
from tests.support.source_tree import SOURCE
from tests.train.test_job import this_rank

LIMIT_S = 300.0  # only for a program that hangs
STEPS = 8
BASE = Arguments(
    preset="tiny", steps=STEPS, sequence_length=16, batch_size=2, dtype="fp32", device="cpu", evaluations=2, log_every=3
)


def train(arguments: Arguments) -> None:
    run_job(resolve_settings(arguments, "cpu"), this_rank())


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(800)))
    return path


def losses(out: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, norm of the gradient and learning rate, by step."""
    records = read_records(out / "metrics.jsonl")
    return {record.step: (record.loss, record.grad_norm, record.learning_rate) for record in records}


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize(("strategy", "in_background"), [("3", True), ("1", False)])
def test_a_run_in_two_parts_equals_a_run_in_one(
    run_ranks: RunRanks, text_file: Path, tmp_path: Path, strategy: Any, in_background: bool
) -> None:
    whole = replace(BASE, strategy=strategy, data=str(text_file), out=tmp_path / "whole")
    run_ranks(2, train, whole)
    saving = CheckpointArguments(save=tmp_path / "saved", save_interval=2, keep_last=2, async_save=in_background)
    dumping = replace(saving, dump_param_to_param_group_map=tmp_path / "map")
    run_ranks(2, train, replace(whole, out=tmp_path / "first", exit_interval=5, checkpoints=dumping))
    assert sorted(path.name for path in (tmp_path / "saved").glob("iter_*")) == ["iter_0000004", "iter_0000005"]

    loading = replace(saving, load=tmp_path / "saved", verify_integrity=True)
    run_ranks(2, train, replace(whole, out=tmp_path / "second", checkpoints=loading))
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert (list(first), list(second)) == ([1, 2, 3, 4, 5], [6, 7, 8])
    assert first | second == losses(tmp_path / "whole")
    assert summary(tmp_path / "second")["held_out_loss"] == summary(tmp_path / "whole")["held_out_loss"]
    assert summary(tmp_path / "second")["sample"] == summary(tmp_path / "whole")["sample"]
    before = read_records(tmp_path / "first" / "metrics.jsonl")[-1].elapsed_s
    assert read_records(tmp_path / "second" / "metrics.jsonl")[0].elapsed_s > before
    assert sorted(path.name for path in (tmp_path / "saved").glob("iter_*")) == ["iter_0000006", "iter_0000008"]
    groups = json.loads(export_group_map_json(tmp_path / "map").read_text())
    assert set(groups.values()) == {0, 1}  # with and without weight decay
    assert all((index == 1) == ("norm" in name or "embed" in name) for name, index in groups.items()), groups


def refusal(arguments: Arguments) -> str:
    with pytest.raises(Exception) as caught:
        train(arguments)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_folder_that_does_not_fit_is_refused(run_ranks: RunRanks, text_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    base = replace(BASE, data=str(text_file), steps=2)
    # Not there yet: a run that is started again and again with the same options begins with the first step.
    restarting = CheckpointArguments(save=saved, load=saved, no_save_optim=True)
    run_ranks(2, train, replace(base, out=tmp_path / "0", checkpoints=restarting))
    cases = {
        "CheckpointError: ": CheckpointArguments(load=tmp_path / "nowhere"),
        "has 2 steps already: give --steps above 2": CheckpointArguments(load=saved, no_load_optim=True),
        "holds a checkpoint of step 2, and this run begins after step 0": CheckpointArguments(save=saved),
        "give --no-strict-fsdp-dtensor-load to load what fits, or --no-load-optim": CheckpointArguments(load=saved),
        "file cannot be written (File exists): give a folder that can be": CheckpointArguments(save=tmp_path / "file"),
    }
    (tmp_path / "file").touch()
    for number, (words, options) in enumerate(cases.items()):
        told = run_ranks(2, refusal, replace(base, out=tmp_path / f"refused{number}", checkpoints=options))
        assert words in told[0]
        assert told[0] == told[1]
        assert "strict=False" not in told[0]
        assert not list((tmp_path / f"refused{number}").glob("metrics*"))  # before the first step
    fitting = CheckpointArguments(load=saved, no_load_optim=True, no_load_rng=True)
    run_ranks(2, train, replace(base, steps=3, out=tmp_path / "1", checkpoints=fitting))
    assert list(losses(tmp_path / "1")) == [3]


def output_of(arguments: Arguments) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        train(arguments)
    return " ".join(shown.getvalue().split())


def test_a_job_that_is_started_again_and_again_ends_well(run_ranks: RunRanks, text_file: Path, tmp_path: Path) -> None:
    saved, run = tmp_path / "saved", replace(BASE, data=str(text_file))
    options = CheckpointArguments(save=saved, load=saved, save_interval=2)
    left = saved / "iter_0000002"
    left.mkdir(parents=True)
    (left / "x").write_text("half a copy")
    run_ranks(2, train, replace(run, steps=4, out=tmp_path / "0", checkpoints=options))
    assert not (left / "x").exists()  # replaced by what the run has saved itself
    # A kill between the name of a checkpoint and the pointer.
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    run_ranks(2, train, replace(run, steps=4, out=tmp_path / "1", checkpoints=options))
    first, second = losses(tmp_path / "0"), losses(tmp_path / "1")
    assert list(second) == [3, 4]
    assert second == {step: first[step] for step in (3, 4)}
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    told, _ = run_ranks(2, output_of, replace(run, steps=4, out=tmp_path / "2", checkpoints=options))
    assert "has all 4 steps: the training is done" in told
    assert not (tmp_path / "2" / "metrics.jsonl").exists()


def test_an_error_names_options_and_no_arguments() -> None:
    with pytest.raises(CheckpointError, match="move it away") as caught, in_options():
        raise CheckpointError("a exists; pass overwrite=True to replace it, or save another iteration")
    assert "overwrite" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"^as it is$"), in_options():
        raise CheckpointError("as it is")


def test_options_that_do_nothing_or_do_not_exist_are_refused() -> None:
    cases = {
        "--save-interval does nothing without --save FOLDER": CheckpointArguments(save_interval=3),
        "--verify-integrity does nothing without --load FOLDER": CheckpointArguments(verify_integrity=True),
        "--keep-last 0 is not possible: give 1 or more": CheckpointArguments(save=Path("a"), keep_last=0),
        "--ckpt-format torch_dist is not written or read": CheckpointArguments(ckpt_format="torch_dist"),
    }
    for words, options in cases.items():
        with pytest.raises(ConfigurationError, match=words):
            resolve_settings(replace(BASE, checkpoints=options), "cpu")


def start(*options: str) -> "subprocess.Popen[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "LOCAL_"))}
    quick = ["--preset", "tiny", "--device", "cpu", "--ranks", "2", "--dtype", "fp32", "--sequence-length", "16"]
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_fsdp.train", *quick, "--batch-size", "2", "--lr-decay-iters", "40", *options],
        env={**kept, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_interrupted_run_is_saved_and_goes_on(run_ranks: RunRanks, text_file: Path, tmp_path: Path) -> None:
    saved, data = tmp_path / "saved", ("--data", str(text_file))
    options = (*data, "--out", str(tmp_path / "first"), "--save", str(saved), "--steps", "1000000", "--log-every", "2")
    process = start(*options)
    assert process.stdout is not None
    assert any(line.startswith("step ") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "stopped and saved after" in shown
    first = losses(tmp_path / "first")
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == str(len(first))

    steps = str(len(first) + 3)
    process = start(*data, "--out", str(tmp_path / "second"), "--load", str(saved), "--steps", steps)
    shown, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert " 0 missing, 0 unexpected, 0 of another shape" in shown
    assert "random states: restored for every logical rank" in shown
    assert "not as it was saved" not in shown
    whole = replace(BASE, data=str(text_file), out=tmp_path / "whole", steps=int(steps), lr_decay_iters=40)
    run_ranks(2, train, whole)
    assert first | losses(tmp_path / "second") == losses(tmp_path / "whole")
