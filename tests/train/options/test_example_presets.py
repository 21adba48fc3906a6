"""The presets among the examples: they resolve for their ranks, and the script for Slurm starts what it says."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World, check_environment, resolve
from tests.support.settling import LIMIT_S

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "presets"
PRESETS = {path.stem: int(path.stem.rpartition("-")[2].removesuffix("gpu")) for path in FOLDER.glob("*.yaml")}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_without_surprises(name: str) -> None:
    path = Path("examples/presets") / f"{name}.yaml"
    world = World(PRESETS[name], "cuda")
    job = resolve(parse_options(["--config", str(path)]), world)
    assert job.notes == ()
    assert job.batch.filled == 0
    assert (job.engine, job.ddp.data_parallel_sharding_strategy) == ("megatron_fsdp", "optim_grads_params")
    ddp = job.ddp
    assert (job.dtype, ddp.megatron_fsdp_grad_comm_dtype) == (torch.bfloat16, torch.bfloat16)
    assert (ddp.megatron_fsdp_main_params_dtype, ddp.megatron_fsdp_main_grads_dtype) == (torch.float32, torch.float32)
    assert job.options.model.hf_config is not None
    assert json.loads(job.options.model.hf_config.read_text(encoding="utf-8"))["model_type"] in ("llama", "deepseek_v3")
    assert check_environment({}, job, world) == ()


def _started(folder: Path, name: str, nodes: int) -> subprocess.CompletedProcess[str]:
    """Run the script of Slurm with commands that only write down what they were given."""
    for command, text in {
        "srun": 'echo "$@" > "$HERE/srun.txt"; env > "$HERE/env.txt"',
        "scontrol": "echo node1",
    }.items():
        (folder / command).write_text(f"#!/bin/bash\n{text}\n")
        (folder / command).chmod(0o755)
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
    words = (tmp_path / "srun.txt").read_text().partition("pretrain_gpt.py")[2].split()
    job = resolve(parse_options(words), World(PRESETS[name], "cuda"))
    assert job.load_is_optional
    assert words[:2] == ["--config", f"examples/presets/{name}.yaml"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_refuses_other_nodes_than_a_preset_is_for(tmp_path: Path) -> None:
    ended = _started(tmp_path, "llama3-8b-64gpu", 4)
    assert ended.returncode == 2
    assert ended.stderr == "llama3-8b-64gpu is for 64 GPUs, and 4 nodes have 32: give --nodes for it\n"
    assert not (tmp_path / "srun.txt").exists()
