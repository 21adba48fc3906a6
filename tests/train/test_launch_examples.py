"""The files that start the trainer elsewhere: what can be checked without Slurm, Kubernetes and Ray."""

import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_fsdp.train.options.command_line import make_parser
from tests.support.settling import LIMIT_S
from tests.support.source_tree import ROOT

FOLDER = ROOT / "examples" / "launch"
FLAGS = {flag for action in make_parser()._actions for flag in action.option_strings}
OF_TORCHRUN = {"--nnodes", "--nproc-per-node", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_is_a_script_and_asks_slurm_for_what_recovery_needs() -> None:
    path = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--requeue", "--signal=B:TERM@300", "--ntasks-per-node=1"} <= asked
    code = "\n".join(line for line in lines if not line.startswith("#"))
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) - {"--kill-on-bad-exit", "--signal"}
    assert used == OF_TORCHRUN | {"--out"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_passes_sigterm_on_and_queues_the_job_again(tmp_path: Path) -> None:
    for name, text in {
        "srun": 'trap "exit 0" TERM; echo "$@" > srun.txt; kill -TERM $PPID; while :; do sleep 0.05; done',
        "scancel": 'echo "$@" > scancel.txt; kill -TERM "$(cat srun.pid)"',
        "scontrol": 'if [ "$1" = requeue ]; then echo "$@" > requeue.txt; else echo node1; echo node2; fi',
    }.items():
        body = f"echo $$ > {name}.pid\n{text}\n"
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    command = ["bash", str(FOLDER / "slurm.sbatch"), "--preset", "tiny"]
    env |= {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    ended = subprocess.run(command, env=env, cwd=tmp_path, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "scancel.txt").read_text() == "--signal=TERM 7.0\n"
    assert (tmp_path / "requeue.txt").read_text() == "requeue 7\n"
    told = (tmp_path / "srun.txt").read_text()
    assert "--nnodes=2 --nproc-per-node=8 " in told
    assert "--rdzv-endpoint=node1:20007 " in told
    assert told.endswith("-m megatron_fsdp.train --out runs/7 --preset tiny\n")


def test_the_manifest_is_a_train_job_whose_flags_exist() -> None:
    manifest = yaml.safe_load((FOLDER / "kubeflow_trainjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = manifest["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "--max-restarts=3", "-m", "megatron_fsdp.train"]
    flags = {argument.partition("=")[0] for argument in trainer["args"]}
    assert flags <= FLAGS
    values = dict(argument.split("=") for argument in trainer["args"])
    assert values["--save"] == values["--load"]


def test_the_entry_for_ray_compiles_and_says_what_it_needs(tmp_path: Path) -> None:
    path = FOLDER / "ray_train.py"
    py_compile.compile(str(path), cfile=str(tmp_path / "x.pyc"), doraise=True)
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(("Ray Train is not installed here", "usage: ray_train.py"))
