"""The presets among the examples: they resolve for their ranks, and the script for Slurm starts what it says."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_fsdp.train.options.job import World, check_environment
from tests.support.settling import LIMIT_S
from tests.support.source_tree import ROOT
from tests.support.train_program import job_of_words

FOLDER = ROOT / "examples" / "presets"
PRESETS = {path.stem: int(path.stem.rpartition("-")[2].removesuffix("gpu")) for path in FOLDER.glob("*.yaml")}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_without_surprises(name: str) -> None:
    job = job_of_words(f"--config examples/presets/{name}.yaml", PRESETS[name], "cuda")
    assert job.notes == ()
    assert job.batch.filled == 0
    assert (job.engine, job.ddp.data_parallel_sharding_strategy) == ("megatron_fsdp", "optim_grads_params")
    ddp = job.ddp
    assert (job.dtype, ddp.megatron_fsdp_grad_comm_dtype) == (torch.bfloat16, torch.bfloat16)
    assert (ddp.megatron_fsdp_main_params_dtype, ddp.megatron_fsdp_main_grads_dtype) == (torch.float32, torch.float32)
    assert job.options.model.hf_config is not None
    assert json.loads(job.options.model.hf_config.read_text(encoding="utf-8"))["model_type"] in ("llama", "deepseek_v3")
    assert check_environment({}, job, World(PRESETS[name], "cuda")) == ()


def write_commands(folder: Path, **texts: str) -> None:
    """Make commands of Bash, by name."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


def _started(folder: Path, name: str, nodes: int) -> subprocess.CompletedProcess[str]:
    """Run the script of Slurm with commands that only write down what they were given."""
    write_commands(folder, srun='echo "$@" > "$HERE/srun.txt"; env > "$HERE/env.txt"', scontrol="echo node1")
    env = {"PATH": f"{folder}:/usr/bin:/bin", "HERE": str(folder), "SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "7"}
    env |= {"SLURM_JOB_NODELIST": "node1", "DATA": "text", "TOKENIZER": "own", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = ["bash", str(FOLDER / "sbatch.sh"), name]
    return subprocess.run(command, env=env, timeout=LIMIT_S, check=False, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", PRESETS)
def test_the_script_starts_a_preset_with_flags_that_are_taken(name: str, tmp_path: Path) -> None:
    ended = _started(tmp_path, name, PRESETS[name] // 8)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in (tmp_path / "env.txt").read_text()
    words = (tmp_path / "srun.txt").read_text().partition("pretrain_gpt.py")[2]
    assert job_of_words(words, PRESETS[name], "cuda").load_is_optional
    assert words.split()[:2] == ["--config", f"examples/presets/{name}.yaml"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_refuses_other_nodes_than_a_preset_is_for(tmp_path: Path) -> None:
    ended = _started(tmp_path, "llama3-8b-64gpu", 4)
    assert ended.returncode == 2
    assert ended.stderr == "llama3-8b-64gpu is for 64 GPUs, and 4 nodes have 32: give --nodes for it\n"
    assert not (tmp_path / "srun.txt").exists()
