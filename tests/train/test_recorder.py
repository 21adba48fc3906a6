"""What was applied, and what a run keeps of its steps over restarts."""

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.measure import Evaluation, Progress, Speed, StepRecord, Writer
from megatron_fsdp.train.options.checks import require_there
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.train.recorder import (
    JsonLines,
    Recorder,
    applied,
    find_writers,
    from_line,
    header_rows,
    read_lines,
    step_scalars,
    to_json,
    to_line,
)
from tests.support.array_tokens import token_data
from tests.support.on_ranks import refusal
from tests.support.train_program import job_of_words
from tests.train.records import record


def lines(records: Sequence[StepRecord]) -> list[str]:
    """The records as they are written; those with NaN are never equal."""
    return [repr(each) for each in records]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--bf16 --grad-reduce-in-bf16", ("bfloat16", "float32", "float32", "bfloat16")),
        ("--bf16 --megatron-fsdp-main-params-dtype bf16", ("bfloat16", "bfloat16", "float32", "float32")),
        ("--fp16", ("float16", "float32", "float32", "float32")),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", ("bfloat16", "float32", "float32", "float32")),
    ],
)
def test_dtypes_are_those_that_the_engine_will_use(flags: str, expected: tuple[str, ...]) -> None:
    job, tokens = job_of_words(f"--preset tiny {flags}"), np.zeros(1000, dtype=np.uint16)
    rank, speed = Rank(0, 2, torch.device("cpu"), 0), Speed(job.tokens_per_step, 4.09e8, 2, 0.2)
    rows = dict(header_rows(job, rank, token_data(tokens, tokens[:100]), Path("runs/x"), speed))
    names = ("compute", "main weights", "main gradients", "gradient communication")
    assert rows["dtypes"] == ", ".join(map(" ".join, zip(names, expected, strict=True)))


def test_a_record_comes_back_as_it_was_written() -> None:
    third = record(3, loss_scale=1024.0)
    assert lines([from_line(to_line(third), StepRecord)]) == lines([third])
    assert from_line(to_line(Evaluation(7, 1.25)), Evaluation) == Evaluation(7, 1.25)
    found = json.loads(to_line(record(2)))  # of another version, with other fields
    del found["mfu"]
    again = from_line(json.dumps({**found, "another": 1}) + "\n", StepRecord)
    assert again is not None
    assert math.isnan(again.mfu)
    assert again.loss == 2.5


def test_lines_are_strict_json_and_what_is_not_finite_is_null() -> None:
    line = to_line(record(1, loss=math.inf, mfu=math.nan, exposed_share=math.nan))
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["loss"], found["mfu"], found["exposed_share"], found["tflops"]) == (None, None, None, 1.25)
    again = from_line(line, StepRecord)
    assert again is not None
    assert math.isnan(again.loss)
    assert math.isnan(again.mfu)
    assert json.loads(to_json({"a": [1.0, math.nan], "p": Path("x")})) == {"a": [1.0, None], "p": "x"}


def test_a_torn_line_is_no_record_and_is_left_out(tmp_path: Path) -> None:
    for line in ("", "{}", "[1]", '{"step": 3', '{"step": null}', '{"step": 3}', "7\n"):
        assert from_line(line, StepRecord) is None
    path = tmp_path / "metrics.jsonl"
    whole = to_line(record(1)) + "not a record\n" + to_line(record(2))
    path.write_bytes(whole.encode() + b"\xff\x00\n" + to_line(record(3)).encode()[:-1])
    assert lines(read_lines(path, StepRecord)) == lines([record(1), record(2)])
    assert read_lines(tmp_path / "nothing", StepRecord) == []


class Display(Writer):
    """Takes note of what it is told."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def start(self, progress: Progress) -> None:
        self.seen.append(progress.steps)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        self.seen.append([found.step for found in records])

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.seen.append(evaluation)


def started(folder: Path, steps: int) -> tuple[Recorder, Display]:
    display = Display()
    recorder = Recorder(display.seen.append, {"metrics.jsonl": JsonLines(folder), "display": display})
    recorder.start(Progress(steps=steps))
    return recorder, display


def test_every_step_stands_once_after_restarts_and_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, display = started(tmp_path, 0)
    first.on_steps([record(1), record(2)])
    first.on_evaluation(Evaluation(2, 1.5))
    first.on_steps([record(3), record(4)])
    first.on_evaluation(Evaluation(4, 1.25))
    first.close()
    assert display.seen == [0, [1, 2], Evaluation(2, 1.5), [3, 4], Evaluation(4, 1.25)]
    with path.open("a") as file:
        file.write('{"step": 5, "sam')  # killed while it wrote
    second, _ = started(tmp_path, 3)
    second.on_steps([record(4, loss=9.0), record(5)])
    second.close()
    expected = [record(1), record(2), record(3), record(4, loss=9.0), record(5)]
    assert lines(read_lines(path, StepRecord)) == lines(expected)
    assert len(path.read_text().splitlines()) == 5
    assert read_lines(tmp_path / "evaluations.jsonl", Evaluation) == [Evaluation(2, 1.5)]


def test_a_run_from_the_start_begins_anew_and_other_ranks_keep_and_write_nothing(tmp_path: Path) -> None:
    first, _ = started(tmp_path, 0)
    first.on_steps([record(1)])
    other = Recorder(pytest.fail)
    other.start(Progress(steps=1))
    other.on_steps([record(2)])
    other.close()
    assert lines(read_lines(tmp_path / "metrics.jsonl", StepRecord)) == lines([record(1)])
    started(tmp_path, 0)
    assert read_lines(tmp_path / "metrics.jsonl", StepRecord) == []


def test_a_writer_that_cannot_even_begin_is_left_out_and_its_passwords_are_not_shown() -> None:
    class Failing(Writer):
        def start(self, progress: Progress) -> None:  # noqa: ARG002
            raise ConnectionError("no answer from 'https://me:zq7@secret@host:5000/api', nor from http://host/a@b")

    display = Display()
    recorder = Recorder(display.seen.append, writers={"W&B": Failing(), "display": display})
    recorder.start(Progress())
    recorder.on_steps([record(1)])
    recorder.on_evaluation(Evaluation(1, 1.0))
    recorder.close()
    told = "no answer from 'https://host:5000/api', nor from http://host/a@b"
    assert display.seen == [
        f"W&B cannot be written ({told}): training goes on, with gaps in it or without it",
        0,
        [1],
        Evaluation(1, 1.0),
    ]


# ---- files and trackers over restarts; W&B is a mock, since it needs an account --------------------------------------

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
    wandb = Mock(spec=["init"])
    wandb.init.return_value = Mock(spec=["define_metric", "log", "finish"])
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
