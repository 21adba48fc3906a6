"""The recorder and its files over restarts: every step stands there exactly once, and no writer ends a run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_fsdp.train.progress import Progress
from megatron_fsdp.train.reporting.metrics import Evaluation, StepRecord, read_lines, read_records
from megatron_fsdp.train.reporting.recorder import Recorder
from megatron_fsdp.train.reporting.writers.json_lines import JsonLines
from megatron_fsdp.train.reporting.writers.writer import Careful
from tests.train.reporting.records import record


class Display:
    """Takes note of what it is told."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def start(self, progress: Progress) -> None:
        self.seen.append(progress.steps)

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        self.seen.append([found.step for found in records])

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.seen.append(evaluation)

    def say(self, text: str) -> None:
        self.seen.append(text)


def started(folder: Path, steps: int) -> tuple[Recorder, Display]:
    display = Display()
    recorder = Recorder(display, folder, [Careful(lambda: JsonLines(folder), "metrics.jsonl", display.say)])
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
    assert second.records == [record(1), record(2), record(3)]
    assert second.evaluations == [Evaluation(2, 1.5)]
    second.on_steps([record(4, loss=9.0), record(5)])
    second.close()
    expected = [record(1), record(2), record(3), record(4, loss=9.0), record(5)]
    assert second.records == expected
    assert read_records(path) == expected
    assert len(path.read_text().splitlines()) == 5
    assert read_lines(tmp_path / "evaluations.jsonl", Evaluation) == [Evaluation(2, 1.5)]


def test_a_run_from_the_start_begins_anew(tmp_path: Path) -> None:
    first, _ = started(tmp_path, 0)
    first.on_steps([record(1)])
    second, _ = started(tmp_path, 0)
    assert second.records == []
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_other_ranks_keep_and_write_nothing(tmp_path: Path) -> None:
    first, _ = started(tmp_path, 0)
    first.on_steps([record(1)])
    other = Recorder(Display(), None)
    other.start(Progress(steps=1))
    other.on_steps([record(2)])
    other.close()
    assert other.records == [record(2)]
    assert read_records(tmp_path / "metrics.jsonl") == [record(1)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_is_said_once_and_does_not_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder, display = started(tmp_path, 0)
    path.symlink_to("/dev/full")
    recorder.on_steps([record(1)])
    recorder.on_steps([record(2)])
    path.unlink()  # there is room again
    recorder.on_steps([record(3)])
    recorder.close()
    said = [text for text in display.seen if isinstance(text, str)]
    assert len(said) == 1
    assert said[0].startswith("metrics.jsonl cannot be written ([Errno 28] No space left on device)")
    assert read_records(path) == [record(1), record(2), record(3)]


def test_a_writer_that_cannot_even_begin_is_left_out() -> None:
    display = Display()

    def fail() -> JsonLines:
        raise RuntimeError("no connection")

    recorder = Recorder(display, None, [Careful(fail, "W&B", display.say)])
    recorder.start(Progress())
    recorder.on_steps([record(1)])
    recorder.on_evaluation(Evaluation(1, 1.0))
    recorder.close()
    assert display.seen == [
        "W&B cannot be written (no connection): training goes on, with gaps in it or without it",
        0,
        [1],
        Evaluation(1, 1.0),
    ]


def test_passwords_in_what_a_tracker_says_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> JsonLines:
        raise ConnectionError("no answer from 'https://me:zq7@secret@host:5000/api', nor from http://host/a@b")

    Careful(fail, "MLflow", print).start(Progress())
    assert "(no answer from 'https://host:5000/api', nor from http://host/a@b)" in capsys.readouterr().out
