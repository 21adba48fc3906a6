"""The example of the guide runs as printed, with each strategy by one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.source_tree import ROOT


@pytest.mark.parametrize("name", ["fsdp2", "megatron_fsdp", "ddp"])
def test_one_line_of_yaml_is_another_strategy(tmp_path: Path, name: str) -> None:
    settings = yaml.safe_load((ROOT / "examples" / "finetune_hf.yaml").read_text(encoding="utf-8"))
    assert settings["distributed"]["strategy"] == "fsdp2"
    settings["distributed"]["strategy"] = name
    settings["training"] |= {"steps": 10, "sequence": 32, "text": str(ROOT / "docs"), "output": str(tmp_path / "out")}
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "finetune_hf.py"), str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = re.search(r"step 10: loss (\d+\.\d+), gradient norm (\d+\.\d+)", done.stdout)
    assert told is not None, done.stdout
    assert float(told[1]) < 5.0  # ln 256 = 5.5 at the start
    assert "plain transformers reads 791,680 parameters" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
