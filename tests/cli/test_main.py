"""The commands: help, pages, misspelt ones; `mfsdp trace` and `mfsdp describe` as users type them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_fsdp.cli.main import main
from megatron_fsdp.trace.files import write_timeline
from tests.cli.test_plan import small_config
from tests.support.source_tree import ROOT, SOURCE
from tests.trace.synthetic import KNOWN, collective
from tests.trace.test_files import check

COMMANDS = ("train", "plan", "doctor", "describe", "trace", "hang", "checkpoint", "docs")


def test_help_names_every_command_and_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from megatron_fsdp.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "assert not {'torch', 'numpy', 'rich', 'matplotlib'} & sys.modules.keys(), 'slow to import'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"\n    {command}" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    assert f"mfsdp {command}" in capsys.readouterr().out


def test_a_misspelled_command_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doktor"])
    assert ended.value.code == 2
    assert "did you mean doctor?" in capsys.readouterr().err


def test_pages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "debugging"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    assert main(["docs"]) == 0
    assert "debugging\ndesign\n" in capsys.readouterr().out
    assert main(["docs", "debuging"]) == 2
    assert capsys.readouterr().err == "error: there is no page 'debuging'; did you mean 'debugging'?\n"


# ---- `mfsdp trace ...` from the outside: what it prints, what it writes, and its exit status -------------------------


OTHER = replace(KNOWN, rank=1, collectives=(collective((110, 120), 200, (480, 480, 480)),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks."""
    for timeline in (KNOWN, OTHER):
        write_timeline(tmp_path / "traces", timeline)
    return tmp_path / "traces"


def test_a_folder_as_a_table_as_exact_numbers_and_as_one_file_for_a_viewer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "communication hidden 84.4%",
        "ranks 2 of 2, cpu",
        "",
        "rank step time (ms) communication (ms) exposed (ms) hidden",
        "0 0 0.00 0.00 0.00 83.3%",
        "1 0 0.00 0.00 0.00 88.9%",
    ]
    assert main(["trace", str(folder), "--json", "--merge", str(tmp_path / "all.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hidden"] == 1 - 70 / 450
    steps = [(step["rank"], step["communication_ns"], step["exposed_ns"]) for step in told["steps"]]
    assert steps == [(0, 360, 60), (1, 90, 10)]
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    check(events)
    assert {event["pid"] for event in events} == {0, 1}


def test_missing_ranks_are_an_error_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_timeline(tmp_path, replace(KNOWN, recording="now", peers=(0, 1), is_cut=True))
    assert main(["trace", str(tmp_path)]) == 2
    assert "lacks the files of ranks 1, which recorded too" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--partial"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2, cpu" in shown
    assert "incomplete            a step had more phases than there was room for" in shown


# ---- `mfsdp describe`: text, JSON, exit statuses ---------------------------------------------------------------------


TOWER = "tests.support.zoo:Tower"


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "--model", TOWER, "--ranks", "8", "--rank", "5", "--strategy", "optim"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("wrapper MegatronFSDP, model Tower, rank 5, world_size 8, device cpu, strategy optim,")
    assert "unit floors.0 ... floors.7 (8 units): Floor, 1,024 parameters each" in told
    assert not dist.is_initialized()


def test_json_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, dtype="bfloat16")
    arguments = ["--ranks", "1024", "--outer", "4", "--rank", "1023", "--outer-strategy", "optim", "--json"]
    options = ["--option", "grad_comm_dtype=fp32", "--option", "max_gathered_units=3", "--optimizer", "none"]
    assert main(["describe", "--hf-config", config, *arguments, *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(axis["name"], axis["size"], axis["position"]) for axis in told["axes"]] == [
        ("dp_outer", 4, 3),
        ("dp_shard", 256, 255),
    ]
    assert told["memory"]["slots"] == 3
    assert told["optimizers"] == []
    assert {group["reduce"] for unit in told["units"] for group in unit["groups"]} == {"float32"}
    classes = ["LlamaForCausalLM", "Embedding", *["LlamaDecoderLayer"] * 3, "Linear"]
    assert [unit["class_name"] for unit in told["units"]] == classes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", TOWER, "--ranks", "8", "--outer", "3"], "does not divide --ranks 8"),
        (["--model", TOWER, "--ranks", "8", "--rank", "8"], "give 0 to 7"),
        (["--model", TOWER, "--ranks", "8", "--strategy", "7"], "zero_dp_strategy"),
        (["--model", TOWER, "--ranks", "8", "--option", "nothing=1"], "give NAME=VALUE with an option of fully_shard"),
        (["--model", TOWER, "--ranks", "8", "--option", "verify_ranks"], "give NAME=VALUE"),
        (["--model", "tests.support.zoo:Towr", "--ranks", "8"], "the nearest name is 'Tower'"),
        (["--hf-config", "no/such/folder", "--ranks", "8"], "there is no such file or folder as no/such/folder"),
    ],
)
def test_refusals(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not dist.is_initialized()
