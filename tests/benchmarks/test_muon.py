"""The contenders that step Muon train alike."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.contenders import FSDP2_MUON, OUR_MUON, Setting, build_contender
from benchmarks.workloads import WORKLOADS, make_batch
from tests.support.api_net import mesh
from tests.support.on_ranks import on_ranks


@on_ranks(2)
def test_both_muons_train_alike() -> None:
    cpu = torch.device("cpu")
    setting = Setting(WORKLOADS["tiny"], torch.float32, cpu, mesh(), comm_dtype=torch.float32)
    batches = [make_batch(setting.workload, cpu, 2 * step + dist.get_rank()) for step in range(3)]
    jobs = [build_contender(name, setting) for name in (OUR_MUON, FSDP2_MUON)]
    ours, gathered = ([job.step([batch]).item() for batch in batches] for job in jobs)
    assert ours == pytest.approx(gathered, rel=1e-4)
    assert len(set(ours)) == 3
