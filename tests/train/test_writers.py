"""Files and trackers over restarts; W&B and MLflow are stand-in modules, since they need an account or a server."""

import importlib.util
import math
import resource
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.measure import Evaluation, Progress
from megatron_fsdp.train.options.checks import require_packages
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.resolve import resolve
from megatron_fsdp.train.program import start_ranks
from megatron_fsdp.train.recorder import LineFile, Writer, applied, find_writers, step_scalars
from tests.train.records import record

FULL = Path("/dev/full")


def test_lines_are_added_and_kept_and_a_torn_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.keep(lambda _: True)
    file.append(["a\n", "b\n"])
    file.append(["c\n"])
    assert path.read_text() == "a\nb\nc\n"
    with path.open("a") as opened:
        opened.write("to")
    LineFile(path).keep(lambda line: line != "b\n")
    assert path.read_text() == "a\nc\n"
    assert [found.name for found in tmp_path.iterdir()] == ["lines"]


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.symlink_to(FULL)
    file = LineFile(path)
    for line in ("a\n", "b\n"):
        with pytest.raises(OSError, match="No space left"):
            file.append([line])
    path.unlink()  # there is room again
    file.append(["c\n"])
    assert path.read_text() == "a\nb\nc\n"
    file.flush()
    assert path.read_text() == "a\nb\nc\n"


def test_half_a_line_is_taken_off_again(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("a\n")
    file, before = LineFile(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))  # three bytes more are written, and no fourth
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append(["long line\n"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "a\n"
    file.append(["b\n"])
    assert path.read_text() == "a\nlong line\nb\n"


SECRET = "zq7secret"


def job_of(*flags: str) -> Job:
    return resolve(parse_options(["--preset", "tiny", *flags]), World(2, "cpu"))


def writers_of(job: Job, folder: Path, progress: Progress) -> list[Writer]:
    return [make(progress) for make in find_writers(job, folder, applied(job)["options"]).values()]


def train_twice(job: Job, folder: Path) -> None:
    """Four steps, and again from the third."""
    for start, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        for writer in writers_of(job, folder, Progress(steps=start)):
            writer.on_steps([record(step, loss=10.0 * start + step) for step in steps])
            writer.on_evaluation(Evaluation(steps[-1], 2.0))
            writer.close()


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


# TensorBoard's own files of messages are older than the Python that reads them.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_every_step_once_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = job_of("--tensorboard-dir", str(tmp_path / "events"))
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


def stand_in_for_wandb(calls: list[tuple[str, Any]]) -> types.ModuleType:
    """What the writer uses of wandb, with a note of every call."""

    class Run:
        def define_metric(self, name: str, **named: Any) -> None:
            calls.append(("define_metric", (name, named)))

        def log(self, values: dict[str, float]) -> None:
            calls.append(("log", values))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**named: Any) -> Run:
        calls.append(("init", named))
        return Run()

    module = types.ModuleType("wandb")
    module.__dict__["init"] = init
    return module


def test_wandb_gets_one_run_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in_for_wandb(calls))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    train_twice(job_of("--wandb-project", "mine", "--wandb-exp-name", "first"), tmp_path)
    begun = [named for name, named in calls if name == "init"]
    assert [(named["project"], named["name"], named["resume"], named["dir"]) for named in begun] == 2 * [
        ("mine", "first", "allow", str(tmp_path))
    ]
    assert begun[0]["id"] == begun[1]["id"] == (tmp_path / "wandb_id.txt").read_text()
    assert begun[0]["config"]["train_iters"] == 30
    logged = [values for name, values in calls if name == "log"]
    assert [values["iteration"] for values in logged] == [1, 2, 3, 4, 4, 3, 4, 5, 5]
    assert logged[2] == {**step_scalars(record(3, loss=3.0)), "iteration": 3}
    assert logged[4] == {"lm loss validation": 2.0, "lm loss validation ppl": math.exp(2.0), "iteration": 4}
    assert [name for name, _ in calls].count("finish") == 2
    assert SECRET not in str(calls)


def stand_in_for_mlflow(calls: list[tuple[str, Any]]) -> types.ModuleType:
    """What the writer uses of mlflow, with a note of every call."""

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            calls.append(("get_experiment_by_name", name))

        def create_run(self, experiment: str, run_name: str) -> Any:
            calls.append(("create_run", (experiment, run_name)))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="run-7"))

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def log_param(self, run: str, name: str, value: str) -> None:
            calls.append(("log_param", (run, name, value)))

        def log_batch(self, run: str, metrics: list[Any]) -> None:
            calls.append(("log_batch", (run, metrics)))

        def update_run(self, run: str, status: str) -> None:
            calls.append(("update_run", (run, status)))

        def set_terminated(self, run: str) -> None:
            calls.append(("set_terminated", run))

    module = types.ModuleType("mlflow")
    entities = types.SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, timestamp > 0, step))
    module.__dict__.update(MlflowClient=Client, entities=entities)
    return module


def test_mlflow_gets_one_run_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setitem(sys.modules, "mlflow", stand_in_for_mlflow(calls))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    train_twice(job_of("--mlflow-tracking-uri", "https://host:5000"), tmp_path)
    assert [value for name, value in calls if name == "client"] == 2 * ["https://host:5000"]
    assert [value for name, value in calls if name == "create_run"] == [("id of megatron_fsdp", tmp_path.name)]
    assert ("log_param", ("run-7", "train_iters", "30")) in calls
    assert ("update_run", ("run-7", "RUNNING")) in calls
    batches = [metrics for name, (_, metrics) in (call for call in calls if call[0] == "log_batch")]
    losses = [(step, value) for metrics in batches for key, value, stamped, step in metrics if key == "lm loss"]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    assert all(stamped for metrics in batches for _, _, stamped, _ in metrics)
    assert [name for name, _ in calls].count("set_terminated") == 2
    assert all(len(value) <= 500 for name, value in calls if name == "log_param" for value in value[2:])
    assert SECRET not in str(calls)
    calls.clear()
    writer = writers_of(job_of("--mlflow-tracking-uri", "somewhere"), tmp_path, Progress())[-1]
    writer.on_steps([record(step) for step in range(1, 201)])  # in parts that MLflow takes
    sizes = [len(metrics) for name, (_, metrics) in (call for call in calls if call[0] == "log_batch")]
    assert (sum(sizes), len(sizes), max(sizes) <= 1000) == (200 * len(step_scalars(record(1))), 4, True)


def test_trackers_that_nobody_asked_for_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "tensorboard", "torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    train_twice(job_of(), tmp_path)
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("flag", "package"),
    [("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb"), ("--mlflow-tracking-uri", "mlflow")],
)
def test_a_missing_package_is_refused_in_words(flag: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else pytest.fail(name))
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(ConfigurationError) as caught:
        require_packages(parse_options([flag, "somewhere"]))
    how = "-e '.[train]' in the checkout of mfsdp" if package == "tensorboard" else package
    assert str(caught.value) == (
        f"{flag} needs the package {package}, which is not installed; run pip install {how}, or leave it out"
    )


def test_it_is_refused_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("megatron_fsdp.train.program.launch", lambda *_: pytest.fail("ranks were started"))
    assert start_ranks(["--preset", "tiny", "--device", "cpu", "--wandb-project", "mine"]) == 2
    assert capsys.readouterr().err.startswith("error: --wandb-project needs the package wandb")
