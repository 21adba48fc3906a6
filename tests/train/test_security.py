"""Nothing from outside is executed, and no secret is written down."""

from pathlib import Path

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.command_line import parse_options
from tests.support.train_program import environment, run, write_text

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY")


def config(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(ConfigurationError, match="not YAML"):
        parse_options(["--config", str(config(tmp_path, f"lr: !!python/object/apply:os.mkdir ['{marker}']\n"))])
    assert not marker.exists()


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
