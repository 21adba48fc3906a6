"""The worker pool gives values, errors and stacks back, and outlives whatever a test does to it."""

import os
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.conftest import RunRanks
from tests.support.worker_pool import WorkerError, WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2, failure_grace_s=10.0)
    yield pool
    pool.stop()


def _all_reduced_rank_sum() -> float:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def _raise_on_rank(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on rank {rank}")
    return "fine"


def _hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        _sleep_for_long()


def _sleep_for_long() -> None:
    time.sleep(600)


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def _worker_pid() -> int:
    return os.getpid()


def _warn() -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


def _cuda_all_reduce() -> tuple[str, float]:
    value = torch.ones(3, device="cuda")
    dist.all_reduce(value)
    return dist.get_backend(), value.sum().item()


def test_a_failing_or_dying_rank_is_named_and_the_workers_are_replaced(pool: WorkerPool) -> None:
    before = pool.run(_worker_pid)
    with pytest.raises(WorkerError, match=r"ValueError: no luck on rank 1") as caught:
        pool.run(_raise_on_rank, 1)
    assert list(caught.value.by_rank) == [1]
    assert "in _raise_on_rank" in caught.value.by_rank[1]
    assert set(pool.run(_worker_pid)).isdisjoint(before)
    with pytest.raises(WorkerError, match=r"rank 1: died, exit code 7"):
        pool.run(_die_on_rank_one)
    assert pool.run(_all_reduced_rank_sum) == [3.0, 3.0]
    with pytest.raises(WorkerError, match=r"UserWarning: careless"):
        pool.run(_warn)


@pytest.mark.full
def test_hang_is_killed_and_its_stack_is_shown(pool: WorkerPool) -> None:
    hung_pids = pool.run(_worker_pid)
    with pytest.raises(WorkerError) as caught:
        pool.run(_hang_on_rank_one, timeout_s=20.0)
    assert list(caught.value.by_rank) == [1]
    assert "in _sleep_for_long" in caught.value.by_rank[1]
    assert pool.process_ids() == []
    assert set(pool.run(_worker_pid)).isdisjoint(hung_pids)


@pytest.mark.gpu
def test_cuda_tensors_are_reduced_on_the_device(run_ranks: RunRanks) -> None:
    backend, total = run_ranks(1, _cuda_all_reduce, device_type="cuda")[0]
    assert total == 3.0
    assert "nccl" in backend
