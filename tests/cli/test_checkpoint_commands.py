"""`mfsdp checkpoint ...` from the outside: what it prints and its exit status."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_fsdp.cli import output
from megatron_fsdp.cli.checkpoint import inspector
from megatron_fsdp.cli.main import main
from tests.checkpoint.tools import builders
from tests.support.settling import LIMIT_S
from tests.support.source_tree import ROOT, SOURCE

SRC = SOURCE / "megatron_fsdp"


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


Mfsdp = Callable[..., tuple[int, str, str]]


@pytest.fixture
def mfsdp(capsys: pytest.CaptureFixture[str]) -> Mfsdp:
    """Run `mfsdp checkpoint ...` in this process: (exit status, standard output, standard error)."""

    def run(*argv: object, program: Callable[..., int] = main) -> tuple[int, str, str]:
        words = [str(word) for word in argv]
        try:
            status = program(["checkpoint", *words] if program is main else words)
        except SystemExit as ended:
            status = int(ended.code or 0)
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def test_inspect_prints_a_summary_and_keys(mfsdp: Mfsdp, tmp_path: Path) -> None:
    builders.save_torch_dist(tmp_path / "a", "G3")
    status, out, _ = mfsdp("inspect", tmp_path / "a", "--stats")
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "format torch_dist (Megatron-LM), generation G3" in lines
    assert "iteration 7" in lines
    assert any(line.startswith("tensors 36, 5,792 elements") for line in lines)
    (row,) = [line for line in lines if line.startswith("decoder.layers.mlp.linear_fc1.weight")]
    assert row.split()[1:7] == ["bfloat16", "(2,", "24,", "8)", "768", "B"]


def test_group_meta_is_hidden_unless_asked_for(mfsdp: Mfsdp, tmp_path: Path) -> None:
    builders.save_fsdp_dtensor(tmp_path / "a")
    hint = "(6 keys under optimizer.param_to_group_meta.* are not listed; --all lists them)"
    status, out, _ = mfsdp("inspect", tmp_path / "a")
    assert status == 0
    assert hint in out
    assert "\noptimizer.param_to_group_meta" not in out
    for flag in ("--all", "--not-ignore-param-to-group-meta"):
        _, out, _ = mfsdp("inspect", tmp_path / "a", flag)
        assert hint not in out
        assert out.count("\noptimizer.param_to_group_meta") == 6


def test_what_is_no_folder_cannot_be_verified(mfsdp: Mfsdp, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        assert mfsdp("verify", path) == (2, "", f"error: {path} is not a folder; give a checkpoint or a run\n")


def test_no_gpu_no_nccl_and_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("files need neither ranks nor a GPU")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    builders.save_torch_dist(tmp_path / "a", "G3")
    assert inspector(["inspect", a, "--stats"]) == 0
    assert inspector(["print-tensor", a, "decoder.final_layernorm.weight"]) == 0
    builders.save_torch_dist(tmp_path / "b", "G3", optimizer="none")
    assert inspector(["compare-two-checkpoint", a, b]) == 1
    capsys.readouterr()
    for path in (*(SRC / "checkpoint").glob("*.py"), SRC / "cli" / "checkpoint.py"):
        assert not re.search(r"nccl|\.cuda\b|pickle\.loads?\(|weights_only=False", path.read_text())


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["inspct"], "did you mean inspect?"),
        (["inspect", "a", "k", "--slcie=1"], "did you mean --slice?"),
        (["compare-two-checkpoints"], "did you mean compare-two-checkpoint?"),
    ],
)
def test_what_is_misspelt_is_suggested(mfsdp: Mfsdp, argv: list[str], hint: str) -> None:
    status, _, err = mfsdp(*argv)
    assert status == 2
    assert hint in err
    assert err.startswith("mfsdp checkpoint")
    assert err.endswith(" --help\n")
    assert err.count("\n") == 1  # and no block of usage


def test_options_that_cannot_be_honoured_are_refused(mfsdp: Mfsdp, tmp_path: Path) -> None:
    builders.save({"w": torch.zeros(2)}, tmp_path / "a")
    for argv in (
        ["inspect", tmp_path / "a", "--slice", "0"],
        ["diff", tmp_path / "a", tmp_path / "a", "--bitwise", "--rtol", "1"],
        ["inspect", tmp_path / "a", "w", "--slice", "1,2"],
    ):
        status, out, err = mfsdp(*argv)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")


def test_only_the_first_rank_works(mfsdp: Mfsdp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builders.save({"w": torch.zeros(2)}, tmp_path / "a")
    monkeypatch.setenv("RANK", "1")
    assert mfsdp("inspect", tmp_path / "a") == (0, "", "")
    monkeypatch.setenv("RANK", "0")
    assert mfsdp("inspect", tmp_path / "a")[1]


def test_text_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_line("w\x1b[2J\u202e\udc80")
    output.write_table(["key"], [["\x07k\r"]])
    output.write_error("\x9bx")
    told = capsys.readouterr()
    assert told.out == "w\\x1b[2J\\u202e\\udc80\nkey\n\\x07k\\r\n"
    assert told.err == "error: \\x9bx\n"


@pytest.mark.full
def test_both_programs_start(tmp_path: Path) -> None:
    """In processes of their own; a reader that stops early is no error."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    script = ROOT / "tools" / "checkpoint" / "checkpoint_inspector.py"
    bare = {name: value for name, value in env.items() if name != "PYTHONPATH"}  # a checkout that is not installed
    told = subprocess.run([sys.executable, script, "--help"], env=bare, capture_output=True, text=True, check=True)
    assert "usage: checkpoint_inspector.py" in told.stdout
    builders.save({f"key_number_{i}": i for i in range(500)}, tmp_path / "a")
    command = [sys.executable, "-m", "megatron_fsdp.cli", "checkpoint", "inspect", str(tmp_path / "a")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        assert (process.wait(LIMIT_S), errors) == (0, "")


# ---- map -------------------------------------------------------------------------------------------------------------


NAMES = {
    "module.module.embedding.word_embeddings.weight": 0,
    "module.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": 1,
}
MAP = {
    "model.module.embedding.word_embeddings.weight": 0,
    "model.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": 1,
}


@pytest.mark.parametrize("command", ["map", "print-torch-dcp-in-json"])
def test_the_map_is_written_into_the_folder_and_printed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builders.save(NAMES, tmp_path / "map")
    assert inspector([command, str(tmp_path / "map")]) == 0
    path = tmp_path / "map" / "param_to_param_group_map.json"
    assert json.loads(path.read_text()) == MAP
    content, place = capsys.readouterr().out.splitlines()
    assert json.loads(content.removeprefix("torch dcp content: ")) == MAP
    assert place == str(path)
