"""`mfsdp describe`: text, JSON, exit statuses."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_fsdp.cli.main import main

TOWER = "tests.support.zoo:Tower"
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "dtype": "bfloat16",
}


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "--model", TOWER, "--ranks", "8", "--rank", "5", "--strategy", "optim"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("wrapper MegatronFSDP, model Tower, rank 5, world_size 8, device cpu, strategy optim,")
    assert "unit floors.0 ... floors.7 (8 units): Floor, 1,024 parameters each" in told
    assert not dist.is_initialized()


def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["describe", "--model", TOWER, "--ranks", "8", "--option", "max_gathered_units=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.endswith(", gather float32,") for line in lines), "a name and its value stay together"


def test_json_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    arguments = ["--ranks", "1024", "--outer", "4", "--rank", "1023", "--outer-strategy", "optim", "--json"]
    options = ["--option", "grad_comm_dtype=fp32", "--option", "max_gathered_units=3", "--optimizer", "none"]
    assert main(["describe", "--hf-config", str(tmp_path), *arguments, *options]) == 0
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
