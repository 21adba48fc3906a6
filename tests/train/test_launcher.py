"""How many ranks are started, with which variables, on which device, by which back end, and with which streams."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.program import choose_ranks, find_device_type, is_rank, rank_environment, run_rank
from tests.support.forked_programs import Program, trainer
from tests.support.train_program import LIMIT_S, OPTIONS, environment


@pytest.mark.parametrize(
    ("requested", "num_accelerators", "num_cores", "expected"),
    [(None, 0, 2, 2), (None, 0, 1, 1), (None, 0, 64, 2), (3, 0, 2, 3), (None, 8, 64, 8), (2, 8, 64, 2)],
)
def test_ranks_fit_the_machine(requested: int | None, num_accelerators: int, num_cores: int, expected: int) -> None:
    assert choose_ranks(requested, num_accelerators=num_accelerators, num_cores=num_cores) == expected


def test_more_ranks_than_accelerators_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--nproc 3 needs as many accelerators and 2 are here"):
        choose_ranks(3, num_accelerators=2, num_cores=64)


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
    with pytest.raises(ConfigurationError, match="--device cuda is not available here: use --device cpu"):
        find_device_type("cuda")


# ---- the back end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starter", [trainer, run_rank])
def test_a_back_end_that_does_not_reach_the_device_is_refused_on_all_ranks(starter: Any, tmp_path: Path) -> None:
    options = [*OPTIONS, "--data-path", str(tmp_path), "--distributed-backend", "nccl"]
    said = "--distributed-backend nccl does not go with --device cpu, which it cannot reach: give gloo, or leave it out"
    if starter is trainer:
        program = Program(starter, options, environment())
        assert program.communicate(timeout=LIMIT_S) == ("", f"error: {said}\n")
        assert program.returncode == 2
        return
    files = [tmp_path / f"error{rank}.json" for rank in range(2)]
    for rank, file in enumerate(files):  # one after the other: none waits for the other
        of_torchrun = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        program = Program(starter, options, environment(**of_torchrun, TORCHELASTIC_ERROR_FILE=str(file)))
        program.communicate(timeout=LIMIT_S)
        assert program.returncode == 2
    assert [json.loads(file.read_text())["message"]["message"] for file in files] == [said] * 2
