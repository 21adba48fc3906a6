"""Defects of Megatron-LM's checkpoint inspector (specification, section 7) that the looking-at commands must not have.

Those of the conversion are tested beside it.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_fsdp.cli.checkpoint import inspector
from tests.checkpoint.tools import builders

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "src" / "megatron_fsdp" / "checkpoint" / "tools"
CLI = ROOT / "src" / "megatron_fsdp" / "cli"


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_defect_01_inspect_reads_the_common_state_where_it_is_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builders.save_torch_dist(tmp_path / "a", "G3")
    assert not (tmp_path / "a" / "common.pt").exists()
    assert inspector(["inspect", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["common"]["iteration"] == 7


def test_defect_13_no_gpu_no_nccl_and_no_ranks(
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
    for path in (*TOOLS.glob("*.py"), *CLI.glob("checkpoint.py")):  # conversion is tested beside its code
        assert not re.search(r"nccl|init_process_group|\.cuda\b", path.read_text()), path.name


def test_defect_14_tensors_without_dimensions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(tmp_path / "a")
    builders.save({"step": torch.tensor(3.0), "w": torch.ones(1)}, tmp_path / "a")
    assert inspector(["inspect", a, "--stats"]) == 0
    assert inspector(["print-tensor", a, "step"]) == 0
    assert "tensor(3.)" in capsys.readouterr().out
    builders.save({"step": torch.tensor(4.0), "w": torch.ones(1)}, tmp_path / "c")
    assert inspector(["diff", a, str(tmp_path / "c")]) == 1
    assert "step: 1 of 1 elements differ, first at the only element: 3.0 in A, 4.0 in B" in capsys.readouterr().out


def test_defect_14_objects_are_read_without_running_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Planted:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "owned",)

    builders.save({"w": torch.ones(1), "object": Planted()}, tmp_path / "a")
    assert inspector(["print-tensor", str(tmp_path / "a"), "object"]) == 2
    assert "asks to import" in capsys.readouterr().err
    assert not (tmp_path / "owned").exists()
    for path in TOOLS.glob("*.py"):
        assert not re.search(r"pickle\.loads?\(|weights_only=False", path.read_text()), path.name


def test_defect_15_help_says_what_options_do(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ["inspect", "diff", "verify", "to-torch", "from-torch", "to-hf", "map"]
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
