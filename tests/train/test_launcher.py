"""Ranks: how the launcher and the examples for clusters start them, and what they agree on over machines."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import yaml

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train import ranks
from megatron_fsdp.train.failures import OutOfMemoryError
from megatron_fsdp.train.options.command_line import make_parser
from megatron_fsdp.train.program import choose_ranks, find_device_type, is_rank, rank_environment
from megatron_fsdp.train.ranks import restarts_so_far, work_on_machines
from tests.conftest import RunRanks
from tests.support.forked_programs import Program, trainer
from tests.support.on_ranks import on_ranks, refusal
from tests.support.source_tree import ROOT
from tests.support.train_program import LIMIT_S, OPTIONS, environment, this_rank
from tests.train.options.test_example_presets import write_commands


@pytest.mark.parametrize(
    ("requested", "num_accelerators", "num_cores", "expected"),
    [(None, 0, 2, 2), (None, 0, 1, 1), (None, 0, 64, 2), (3, 0, 2, 3), (None, 8, 64, 8), (2, 8, 64, 2)],
)
def test_ranks_fit_the_machine(requested: int | None, num_accelerators: int, num_cores: int, expected: int) -> None:
    assert choose_ranks(requested, num_accelerators=num_accelerators, num_cores=num_cores) == expected


def test_ranks_share_the_cores_and_the_environment_of_the_user_is_left_alone() -> None:
    assert rank_environment({}, ranks=2, num_cores=8)["OMP_NUM_THREADS"] == "4"
    assert rank_environment({}, ranks=4, num_cores=2)["OMP_NUM_THREADS"] == "1"
    given = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert rank_environment(given, ranks=2, num_cores=8) == {}
    assert is_rank({"RANK": "0", "WORLD_SIZE": "1"})
    assert not is_rank({"PATH": "x"})


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name elsewhere")
def test_traffic_stays_on_this_machine() -> None:
    added = rank_environment({}, ranks=2, num_cores=8)
    assert (added["GLOO_SOCKET_IFNAME"], added["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")


def test_missing_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    assert find_device_type("auto") == find_device_type("cpu") == "cpu"
    told = "--device cuda is not available here: use --device cpu"
    assert told in refusal(find_device_type, "cuda", error=ConfigurationError)


# ---- the back end ----------------------------------------------------------------------------------------------------


def test_a_back_end_that_does_not_reach_the_device_is_refused(tmp_path: Path) -> None:
    program = Program(trainer, [*OPTIONS, "--data-path", str(tmp_path), "--distributed-backend", "nccl"], environment())
    said = "--distributed-backend nccl does not go with --device cpu, which it cannot reach: give gloo, or leave it out"
    assert program.communicate(timeout=LIMIT_S) == ("", f"error: {said}\n")
    assert program.returncode == 2


# ---- the files that start the trainer elsewhere: what can be checked without Slurm, Kubernetes and Ray ---------------


FOLDER = ROOT / "examples" / "launch"
FLAGS = {flag for action in make_parser()._actions for flag in action.option_strings}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_passes_sigterm_on_and_queues_the_job_again(tmp_path: Path) -> None:
    write_commands(
        tmp_path,
        srun='echo $$ > srun.pid; trap "exit 0" TERM; echo "$@" > srun.txt; kill -TERM $PPID; '
        "while :; do sleep 0.05; done",
        scancel='echo "$@" > scancel.txt; kill -TERM "$(cat srun.pid)"',
        scontrol='if [ "$1" = requeue ]; then echo "$@" > requeue.txt; else echo node1; echo node2; fi',
    )
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


# ---- work that the first rank of each machine does: all wait for it, and all hear of what went wrong -----------------


def on_two_machines(local: str, seconds: float, failing: dict[int, str]) -> tuple[bool, str | None]:
    """Work as `local` says; returns whether this rank worked, and what was raised."""
    rank, done = this_rank(), []
    errors = {"usage": ConfigurationError, "memory": OutOfMemoryError, "bug": KeyError}

    def work() -> None:
        time.sleep(seconds)
        done.append(rank.index)
        if rank.index in failing:
            raise errors[failing[rank.index]]("no text")

    with (
        mock.patch.object(ranks, "_BEAT_S", 0.05),
        mock.patch.dict(os.environ, LOCAL_RANK=local.split(",")[rank.index]),
    ):
        try:
            work_on_machines(rank, work)
        except (ConfigurationError, OutOfMemoryError, RuntimeError) as error:
            return bool(done), f"{type(error).__name__} {error}"
    return bool(done), None


def test_the_first_rank_of_each_machine_works_and_all_wait_longer_than_a_beat(run_ranks: RunRanks) -> None:
    assert run_ranks(3, on_two_machines, "0,1,0", 0.0, {}) == [(True, None), (False, None), (True, None)]
    assert run_ranks(3, on_two_machines, "0,1,2", 0.4, {}) == [(True, None), (False, None), (False, None)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("usage", "ConfigurationError no text"),
        ("memory", "OutOfMemoryError no text"),
        ("bug", "RuntimeError rank 2: KeyError('no text')"),
    ],
)
def test_what_goes_wrong_on_one_machine_is_raised_on_all(run_ranks: RunRanks, kind: str, said: str) -> None:
    found = run_ranks(3, on_two_machines, "0,1,0", 0.0, {2: kind})
    assert found == [(True, said), (False, said), (True, said)]


@on_ranks(2)
def test_ranks_agree_on_restarts_where_an_agent_came_back_and_counts_anew() -> None:
    rank = this_rank()
    for counts, agreed in ((("1", "0"), 1), (("0", "0"), 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_RESTART_COUNT", counts[rank.index])
            assert restarts_so_far(rank) == agreed
