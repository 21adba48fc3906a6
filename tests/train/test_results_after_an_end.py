"""Results of a run that was ended at a bad moment: nothing is lost, nothing is overwritten, nothing is shared."""

import json
import shutil
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_fsdp.comm.processes import process_of
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train import run_job
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.recorder import METRICS_FILE, to_json
from megatron_fsdp.train.run_job import SUMMARY_FILE, claim_results
from tests.conftest import RunRanks
from tests.support import on_ranks
from tests.support.train_program import job_of, output_of, refusal, write_text

TAKEN = "another run writes into it now; give another folder"


def take(job: Job, *, goes_on: bool = False) -> Path:
    with ExitStack() as held:
        return claim_results(job, held, goes_on=goes_on)


@pytest.mark.full
def test_a_run_that_was_ended_after_its_last_save_gets_its_results(run_ranks: RunRanks, tmp_path: Path) -> None:
    saved, out = tmp_path / "[red]saved[", tmp_path / "[bold]out" / "[x]"  # markup, if it were taken for such
    data = ("--data-path", str(write_text(tmp_path / "text.txt")), "--eval-interval", "4")
    same = (*data, "--save", str(saved), "--load", str(saved), "--out", str(out))
    (told,) = run_ranks(1, output_of, *same, "--exit-interval", "4")
    assert f"{saved} holds no checkpoint yet" in told
    (told,) = run_ranks(1, output_of, *same)
    assert f"metrics and summary: {out}" in told
    whole, evaluated = json.loads((out / "summary.json").read_text()), (out / "evaluations.jsonl").read_text()
    assert [json.loads(line)["step"] for line in evaluated.splitlines()] == [4, 8]

    (out / "summary.json").write_text(json.dumps({"progress": {"steps": 4}}))  # of the first part
    (told,) = run_ranks(1, output_of, *same)
    assert "has all 8 steps: the training is done" in told
    again = json.loads((out / "summary.json").read_text())
    assert again["held_out_loss"] == whole["held_out_loss"]
    assert (out / "evaluations.jsonl").read_text() == evaluated

    other = tmp_path / "measured"
    for measuring in ((*data, "--load", str(saved), "--out", str(other)), same):
        (told,) = run_ranks(1, output_of, *measuring, "--skip-train")
        assert f"held-out loss {whole['held_out_loss']:.3f}" in told
    assert json.loads((other / "summary.json").read_text())["held_out_loss"] == whole["held_out_loss"]

    shutil.rmtree(saved)
    metrics = (out / METRICS_FILE).read_bytes()
    (told,) = run_ranks(1, refusal, *same)
    assert f"holds an earlier run, and {saved} holds no checkpoint to go on from: give a new folder" in told
    assert (out / METRICS_FILE).read_bytes() == metrics


def test_a_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    job = job_of("--out", str(tmp_path / "out"))
    with ExitStack() as held:
        folder = claim_results(job, held, goes_on=False)
        assert TAKEN in on_ranks.refusal(take, job, error=ConfigurationError)
    assert take(job) == folder
    (folder / METRICS_FILE).touch()
    assert "holds an earlier run: give a new folder" in on_ranks.refusal(take, job, error=ConfigurationError)
    assert take(job, goes_on=True) == folder
    (folder / METRICS_FILE).rename(folder / SUMMARY_FILE)  # as after a run that took no step
    assert "holds an earlier run: give a new folder" in on_ranks.refusal(take, job, error=ConfigurationError)


def launched_by(pid: int) -> str:
    return to_json(asdict(process_of(pid)))


def test_a_claim_lasts_as_long_as_the_launcher_restarts_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = (job_of("--out", str(tmp_path / "out"), restarts=restarts) for restarts in (0, 1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    other = subprocess.Popen(["true"])
    with suppress(RuntimeError), ExitStack() as held:
        folder = claim_results(first, held, goes_on=False)
        assert claim_results(again, held, goes_on=True) == folder  # ranks before the restart may be just ending
        raise RuntimeError  # a rank dies
    with monkeypatch.context() as patch:
        patch.setattr(run_job, "launcher", lambda: launched_by(other.pid))
        other.wait()
        for job in (first, again):
            assert TAKEN in on_ranks.refusal(take, job, error=ConfigurationError, goes_on=True)
    assert take(again, goes_on=True) == folder, "and ended well, so that another may have it"
    with monkeypatch.context() as patch:
        patch.setattr(run_job, "launcher", lambda: launched_by(other.pid))
        assert take(first, goes_on=True) == folder
        with suppress(RuntimeError), ExitStack() as held:
            claim_results(first, held, goes_on=True)
            raise RuntimeError
    assert take(first, goes_on=True) == folder, "its launcher is gone"
