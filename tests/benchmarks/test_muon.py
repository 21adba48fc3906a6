"""The contenders that step Muon train alike."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.contenders import FSDP2_MUON, OUR_MUON, Setting, build_contender
from benchmarks.launching import measure_on_ranks
from benchmarks.workloads import WORKLOADS, make_batch


def losses(_request: object, device: torch.device, mesh: DeviceMesh) -> list[list[float]]:
    setting = Setting(WORKLOADS["tiny"], torch.float32, device, mesh, comm_dtype=torch.float32)
    jobs = [build_contender(name, setting) for name in (OUR_MUON, FSDP2_MUON)]
    batches = [make_batch(setting.workload, device, 2 * step + dist.get_rank()) for step in range(3)]
    return [[job.step([batch]).item() for batch in batches] for job in jobs]


def test_both_muons_train_alike() -> None:
    for ours, gathered in measure_on_ranks(losses, None, 2):
        assert ours == pytest.approx(gathered, rel=1e-4)
        assert len(set(ours)) == 3
