"""torch.distributed is taken down while a save in the background is under way: that save fails, and nothing is lost."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import fully_shard
from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.checkpoint.save import SealingWriter
from megatron_fsdp.checkpoint.store import CheckpointStore
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.test_load import step, wrap
from tests.conftest import RunRanks
from tests.support.worker_pool import WorkerPool


def take_down(root: str) -> str:
    model, optimizer = wrap("odd_shapes", 3, 0)
    step("odd_shapes", model, optimizer, 1)
    checkpoints = Checkpointer(root, keep_last=1, in_background=True)
    checkpoints.save(1, model, optimizer)
    checkpoints.wait()
    is_down, write = threading.Event(), SealingWriter.write_data

    def write_later(*args: Any) -> Any:
        assert is_down.wait(60)
        return write(*args)

    SealingWriter.write_data = write_later  # type: ignore[method-assign]  # this process ends with the test
    checkpoints.save(2, model, optimizer)
    dist.destroy_process_group()
    is_down.set()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.close()
    return str(caught.value)


@pytest.mark.full
def test_half_a_checkpoint_is_not_published(tmp_path: Path) -> None:
    pool = WorkerPool(2, ())
    try:
        for told in pool.run(take_down, str(tmp_path), timeout_s=100.0):
            assert "before destroy_process_group()" in told
    finally:
        pool.stop()
    store = CheckpointStore(tmp_path)
    assert store.iterations() == [1]
    latest = store.latest()
    assert latest is not None
    assert verify(latest).is_whole


class LocalSGD(torch.optim.SGD):
    """Keeps its momentum as this rank's part."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("sum", torch.zeros_like(param.grad.to_local())).add_(
                        param.grad.to_local()
                    )


def local_state(root: str) -> str:
    linear = torch.nn.Linear(4, 4, bias=False)
    model, optimizer = fully_shard(linear, LocalSGD(linear.parameters(), lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises((CheckpointError, ConfigurationError)) as caught:
        Checkpointer(root).save(1, model, optimizer)
    return str(caught.value)


def test_state_of_one_rank_only_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(2, local_state, str(tmp_path))
    assert first == second
    assert "torch.zeros_like(param)" in first
    assert list(tmp_path.iterdir()) == []
