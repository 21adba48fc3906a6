"""Process groups know the accelerator of their rank, wherever the project makes them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.automodel.meshes import set_up_ranks
from megatron_fsdp.comm.groups import bound_device
from megatron_fsdp.doctor.local_ranks import join_job
from megatron_fsdp.train.ranks import join_ranks

CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backend", "device", "bound"),
    [("nccl", SECOND, SECOND), ("cpu:gloo,cuda:nccl", SECOND, SECOND), ("gloo", SECOND, None), ("gloo", CPU, None)],
)
def test_a_group_is_bound_to_an_accelerator_that_its_back_end_connects(
    backend: str, device: torch.device, bound: torch.device | None
) -> None:
    assert bound_device(backend, device) == bound


def by_the_trainer(_folder: Path) -> None:
    with join_ranks("cuda"):
        pass


def by_a_manager(_folder: Path) -> None:
    set_up_ranks("nccl")


def by_the_doctor(folder: Path) -> None:
    job: Any = SimpleNamespace(num_ranks=2, device_type="cuda", folder=folder, timeout_s=1.0)
    join_job(1, job)


@pytest.mark.parametrize("join", [by_the_trainer, by_a_manager, by_the_doctor])
def test_ranks_that_compute_on_an_accelerator_meet_there(
    join: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: given.append(named["device_id"]))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: 2,
        "set_device_index": given.append,
    }
    for name, function in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    join(tmp_path)
    assert given == [1, SECOND]
