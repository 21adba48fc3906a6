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

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.cli import output
from megatron_fsdp.cli.checkpoint import inspector
from megatron_fsdp.cli.main import main
from tests.checkpoint.tools import builders
from tests.support.settling import LIMIT_S

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "megatron_fsdp"


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


def test_inspect_json_and_problems(mfsdp: Mfsdp, tmp_path: Path) -> None:
    folder = builders.save_torch_dist(tmp_path / "a", "G2")
    (folder.path / "metadata.json").unlink()
    status, out, _ = mfsdp("inspect", tmp_path / "a", "--json")
    assert status == 1
    (problem,) = json.loads(out)["problems"]
    assert problem.startswith("metadata.json is missing: a torch_dist checkpoint has it, and it is written last")


def test_show(mfsdp: Mfsdp, tmp_path: Path) -> None:
    builders.save({"w": torch.arange(12.0).reshape(3, 4), "o": {"x": 1}}, tmp_path / "a")
    status, out, _ = mfsdp("inspect", tmp_path / "a", "w", "--slice", "1:,:2", "--json")
    assert status == 0
    assert json.loads(out)["values"] == [[4.0, 5.0], [8.0, 9.0]]
    _, out, _ = mfsdp("print-tensor", tmp_path / "a", "w")
    assert "float32 (3, 4), 48 B" in out
    _, out, _ = mfsdp("inspect", tmp_path / "a", "o.x", "--json")
    assert json.loads(out)["value"] == 1
    status, _, err = mfsdp("inspect", tmp_path / "a", "v")
    assert status == 2
    assert "has no v" in err


def test_diff_tells_by_its_status(mfsdp: Mfsdp, tmp_path: Path) -> None:
    builders.save({"w": torch.zeros(3)}, tmp_path / "a")
    builders.save({"w": torch.tensor([0.0, 1e-9, 0.0])}, tmp_path / "b")
    assert mfsdp("diff", tmp_path / "a", tmp_path / "a") == (0, "the same: 1 keys\n", "")
    status, out, _ = mfsdp("diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert out.startswith("w: 1 of 3 elements differ, first at [1]: 0.0 in A, 9.99")
    assert mfsdp("diff", tmp_path / "a", tmp_path / "b", "--atol", "1e-8")[0] == 0
    assert mfsdp("compare-two-checkpoint", tmp_path / "a", tmp_path / "b")[0] == 0
    assert mfsdp("compare-two-checkpoint", tmp_path / "a", tmp_path / "b", "--bitwise")[0] == 1
    assert mfsdp("diff", tmp_path / "a", tmp_path / "none")[0] == 2
    status, out, _ = mfsdp("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert status == 1
    assert json.loads(out)["differences"][0]["values"]["index"] == [1]


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


def test_tensors_without_dimensions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(tmp_path / "a")
    builders.save({"step": torch.tensor(3.0), "w": torch.ones(1)}, tmp_path / "a")
    assert inspector(["inspect", a, "--stats"]) == 0
    assert inspector(["print-tensor", a, "step"]) == 0
    assert "tensor(3.)" in capsys.readouterr().out
    builders.save({"step": torch.tensor(4.0), "w": torch.ones(1)}, tmp_path / "c")
    assert inspector(["diff", a, str(tmp_path / "c")]) == 1
    assert "step: 1 of 1 elements differ, first at the only element: 3.0 in A, 4.0 in B" in capsys.readouterr().out


def test_help_says_what_options_do(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ["inspect", "diff", "verify", "to-hf", "map"]
    with pytest.raises(SystemExit):
        inspector(["--help"])
    listed = capsys.readouterr().out
    for command in commands:
        assert re.search(rf"^    {command}\s", listed, re.MULTILINE), command
        with pytest.raises(SystemExit) as ended:
            inspector([command, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        described = re.findall(r"^  (-[-\w, ]+)", text, re.MULTILINE)
        assert all(
            re.search(rf"{re.escape(option.split(',')[0].split()[0])}[^\n]*\n?\s+\w", text) for option in described
        )
        if command == "inspect":
            flat = " ".join(text.split())
            assert (
                "--all, --not-ignore-param-to-group-meta also list the keys under optimizer.param_to_group_meta" in flat
            )


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


def test_the_inspector_has_the_same_commands(mfsdp: Mfsdp, tmp_path: Path) -> None:
    builders.save({"w": torch.zeros(2)}, tmp_path / "a")
    assert mfsdp("inspect", tmp_path / "a", program=inspector)[1] == mfsdp("inspect", tmp_path / "a")[1]


@pytest.mark.full
def test_both_programs_start(tmp_path: Path) -> None:
    """In processes of their own; a reader that stops early is no error."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
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


def test_errors_of_the_system_are_one_line(mfsdp: Mfsdp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builders.save({"w": torch.zeros(2)}, tmp_path / "a")

    def refuse(*_args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(CheckpointFolder, "opened", refuse)
    assert mfsdp("inspect", tmp_path / "a", "--stats") == (
        2,
        "",
        "error: PermissionError: [Errno 13] Permission denied\n",
    )


def test_sizes_have_units() -> None:
    assert [output.in_bytes(n) for n in (0, 1023, 1024, 5 << 20, 3 << 30, 2 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 GiB", "2.00 TiB",
    ]  # fmt: skip


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
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    builders.save(NAMES, tmp_path / "map")
    assert inspector([command, str(tmp_path / "map")]) == 0
    path = tmp_path / "map" / "param_to_param_group_map.json"
    assert json.loads(path.read_text()) == MAP
    content, place = capsys.readouterr().out.splitlines()
    assert json.loads(content.removeprefix("torch dcp content: ")) == MAP
    assert place == str(path)


def test_place_and_prefix_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    builders.save({"module.w": 2}, tmp_path / "map")
    assert inspector(["map", str(tmp_path / "map"), "--out", str(tmp_path / "m.json"), "--model-prefix", "m"]) == 0
    assert json.loads((tmp_path / "m.json").read_text()) == {"m.w": 2}
    assert inspector(["map", str(tmp_path / "none")]) == 2
