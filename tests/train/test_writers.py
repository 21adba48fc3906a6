"""Files and trackers over restarts; W&B is a proxy module, since it needs an account."""

import importlib.util
import math
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.measure import Evaluation, Progress, Writer
from megatron_fsdp.train.options.checks import require_there
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.recorder import applied, find_writers, step_scalars
from tests.support.on_ranks import refusal
from tests.support.train_program import job_of_words
from tests.train.records import record

SECRET = "zq7secret"


def writers_of(job: Job, folder: Path, progress: Progress) -> list[Writer]:
    writers = list(find_writers(job, folder, applied(job)["options"], lambda _: None).values())
    for writer in writers:
        writer.start(progress)
    return writers


def train_twice(job: Job, folder: Path) -> None:
    """Four steps, and again from the third."""
    for start, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        for writer in writers_of(job, folder, Progress(steps=start)):
            writer.on_steps([record(step, loss=10.0 * start + step) for step in steps])
            writer.on_evaluation(Evaluation(steps[-1], 2.0))
            writer.close()


# TensorBoard's own files of messages are older than the Python that reads them.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_every_step_once_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = job_of_words(f"--preset tiny --tensorboard-dir {tmp_path}/events")
    train_twice(job, tmp_path)
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("lm loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    assert [event.value for event in found.Scalars("mfu")] == pytest.approx([0.4] * 5)
    assert [(event.step, event.value) for event in found.Scalars("lm loss validation")] == [(5, 2.0)]
    for writer in writers_of(job, tmp_path, Progress()):  # nothing was saved before another restart
        writer.on_steps([record(1)])
        writer.close()
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert [event.step for event in found.Scalars("lm loss")] == [1]


def test_wandb_gets_one_run_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    train_twice(job_of_words("--preset tiny --wandb-project mine --wandb-exp-name first"), tmp_path)
    begun, run = [call.kwargs for call in wandb.init.call_args_list], wandb.init.return_value
    assert [(named["project"], named["name"], named["resume"], named["dir"]) for named in begun] == 2 * [
        ("mine", "first", "allow", str(tmp_path))
    ]
    assert begun[0]["id"] == begun[1]["id"] == (tmp_path / "wandb_id.txt").read_text()
    assert begun[0]["config"]["train_iters"] == 30
    logged = [call.args[0] for call in run.log.call_args_list]
    assert [values["iteration"] for values in logged] == [1, 2, 3, 4, 4, 3, 4, 5, 5]
    assert logged[2] == {**step_scalars(record(3, loss=3.0)), "iteration": 3}
    assert logged[4] == {"lm loss validation": 2.0, "lm loss validation ppl": math.exp(2.0), "iteration": 4}
    assert run.finish.call_count == 2
    assert SECRET not in str(wandb.mock_calls)


@pytest.mark.parametrize(("flag", "package"), [("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb")])
def test_a_missing_package_is_refused_in_words(flag: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else pytest.fail(name))
    monkeypatch.delitem(sys.modules, package, raising=False)
    told = refusal(require_there, parse_options([flag, "somewhere"]), error=ConfigurationError)
    how = "-e '.[train]' in the checkout of mfsdp" if package == "tensorboard" else package
    assert told == (
        f"{flag} needs the package {package}, which is not installed; run pip install {how}, or leave it out"
    )


def test_names_are_those_of_megatron_and_what_is_not_known_is_left_out() -> None:
    assert step_scalars(record(2, loss_scale=8.0)) == {
        "lm loss": 2.5,
        "grad-norm": 1.5,
        "learning-rate": 1e-3,
        "loss-scale": 8.0,
        "iteration-time": 0.5,
        "tokens-per-second": 64.0,
        "consumed-samples": 16.0,
        "skipped-iterations": 0.0,
        "mem-peak-bytes": 2.0**20,
        "throughput": 1.25,
        "mfu": 0.4,
        "exposed-communication": 0.125,
    }
    unknown = step_scalars(record(2, tflops=math.nan, mfu=math.nan, exposed_share=math.nan, loss=math.inf))
    assert not unknown.keys() & {"throughput", "mfu", "exposed-communication"}
    assert unknown["lm loss"] == math.inf
