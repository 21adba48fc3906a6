"""Nothing from outside is executed, no file writes where it likes, and no secret is written down."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.command_line import WRITTEN, read_config_file
from tests.support.train_program import environment, run, write_text

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD")


class Planted:
    """What runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def config(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("place", ["../elsewhere", "a/../../elsewhere", "{root}/elsewhere", "link/x", "~/elsewhere"])
def test_a_file_cannot_write_outside(name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, out = tmp_path / "here", tmp_path / "here" / "out"
    out.mkdir(parents=True)
    for folder in (here, out):
        (folder / "link").symlink_to(tmp_path)
    monkeypatch.chdir(here)
    path = config(here, f"{name}: {place.format(root=tmp_path)}\n")
    for given in (None, out):
        (problem,) = read_config_file(path, given).problems
        assert problem.startswith(f"{path}:1: {name}: ")
        assert " lies outside of " in problem
        assert f"give --{name.replace('_', '-')} on the command line" in problem


def test_places_are_relative_to_the_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path, f"checkpoint:\n  save: checkpoints\n  load: {tmp_path.parent}/base\n")
    assert read_config_file(path).values["save"] == str(tmp_path / "checkpoints")
    found = read_config_file(path, tmp_path.parent / "results").values
    assert found == {"save": str(tmp_path.parent / "results" / "checkpoints"), "load": f"{tmp_path.parent}/base"}
    outside = read_config_file(config(tmp_path, f"save: {tmp_path}/checkpoints\n"), tmp_path / "results")
    assert "lies outside of" in outside.problems[0]  # below the current folder is not below --out


@pytest.mark.parametrize("uri", ["/etc/runs", "file:///etc/runs", "sqlite:////etc/runs.db", "runs"])
def test_a_file_cannot_point_mlflow_at_this_machine(uri: str, tmp_path: Path) -> None:
    refused = read_config_file(config(tmp_path, f"mlflow_tracking_uri: {uri}\n"))
    assert f"mlflow_tracking_uri: {uri} is no server" in refused.problems[0]
    assert refused.values == {}
    server = read_config_file(config(tmp_path, "mlflow_tracking_uri: https://host/x\n"))
    assert (server.values, server.problems) == ({"mlflow_tracking_uri": "https://host/x"}, ())


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(ConfigurationError, match="not YAML"):
        read_config_file(config(tmp_path, f"lr: !!python/object/apply:os.mkdir ['{marker}']\n"))
    assert not marker.exists()


@pytest.mark.full
def test_a_planted_pickle_is_not_opened(tmp_path: Path) -> None:
    marker, text = tmp_path / "marker", str(write_text(tmp_path / "text.txt"))
    bomb = pickle.dumps(Planted(marker))
    folder = tmp_path / "saved"
    run("--data-path", text, "--save", str(folder), "--train-iters", "1", "--out", str(tmp_path / "0"))
    (folder / "iter_0000001" / ".metadata").write_bytes(bomb)
    loading = ("--load", str(folder), "--train-iters", "2", "--out", str(tmp_path / "1"))
    _, errors = run("--data-path", text, *loading, code=2)
    assert "error: " in errors
    np.save(tmp_path / "tokens.npy", np.array([Planted(marker)], dtype=object), allow_pickle=True)
    run("--data-path", str(tmp_path / "tokens.npy"), "--out", str(tmp_path / "2"), code=2)
    out = tmp_path / "3"
    out.mkdir()
    (out / "training.npy").write_bytes((tmp_path / "tokens.npy").read_bytes())
    (out / "held_out.npy").write_bytes((tmp_path / "tokens.npy").read_bytes())
    (out / "data.json").write_text('{"held_out_bytes": 1}')
    run("--data-path", text, "--out", str(out), "--train-iters", "1")  # files of such names are not looked at
    assert not marker.exists()
    os.mkdir(marker)  # what is planted would have worked  # noqa: PTH102
    with pytest.raises(FileExistsError):
        pickle.loads(bomb)


@pytest.mark.full
def test_no_secret_is_written_or_shown(tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text.txt"))
    env = environment(**{name: f"hush-{name}" for name in SECRETS})
    options = ("--save", str(tmp_path / "saved"), "--out", str(tmp_path / "out"), "--train-iters", "2")
    shown, errors = run("--data-path", text, *options, env=env)
    wild = ("--optimizer", "sgd", "--lr", "1e30", "--lr-warmup-iters", "0", "--max-nan-steps", "0")
    more, again = run("--data-path", text, *wild, "--out", str(tmp_path / "wild"), env=env, code=4)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert [path for path in written if b"hush-" in path.read_bytes()] == []
    assert "hush-" not in shown + errors + more + again
