"""The files that start the trainer elsewhere: what can be checked without Slurm, Kubernetes and Ray."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_fsdp.train.options.command_line import make_parser
from tests.support.settling import LIMIT_S
from tests.support.source_tree import ROOT

FOLDER = ROOT / "examples" / "launch"
FLAGS = {flag for action in make_parser()._actions for flag in action.option_strings}


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
