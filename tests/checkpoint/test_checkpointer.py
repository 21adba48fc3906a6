"""The checkpoints of a run, from training loops: found again, verified, in the background, refused in words."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from megatron_fsdp.ema import ShardedEMA
from megatron_fsdp.errors import CheckpointError
from tests.checkpoint.test_load import contents, step, wrap
from tests.conftest import RunRanks
from tests.support.parity import assert_equal_tensors


class Position:
    """A data position: numbers, a list, and a tensor."""

    def __init__(self, sample: int) -> None:
        self.state: dict[str, Any] = {"sample": sample, "seen": [1, (2, "x")], "order": torch.arange(sample)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def save_run(root: str, in_background: bool) -> tuple[Any, dict[str, Tensor], list[int]]:
    model, optimizer = wrap("odd_shapes", 3, 0)
    average = ShardedEMA(model, decay=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    found: Any = None
    with Checkpointer(root, keep_last=2, in_background=in_background) as checkpoints:
        for iteration in (1, 2, 3):
            step("odd_shapes", model, optimizer, iteration)
            schedule.step()
            average.update()
            extra = {"schedule": schedule, "data": Position(3 * iteration), "average": average}
            checkpoints.save(iteration, model, optimizer, extra=extra)
            if iteration == 3:
                found = contents(model, optimizer)
                averages = {name: value.full_tensor() for name, value in average.state_dict().items()}
            step("odd_shapes", model, optimizer, 10)  # must not leak into what is being saved
        checkpoints.wait()
        kept = checkpoints.store.iterations()
    return found, averages, kept


def load_run(root: str) -> tuple[Any, dict[str, Tensor], dict[str, Any], dict[str, Any], str]:
    model, optimizer = wrap("odd_shapes", 2, 5)
    average, data = ShardedEMA(model, decay=0.5), Position(0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    extra = {"schedule": schedule, "data": data, "average": average}
    report = load_checkpoint(model, optimizer, root, extra=extra, verify=True)
    averages = {name: value.full_tensor() for name, value in average.state_dict().items()}
    return contents(model, optimizer), averages, schedule.state_dict(), data.state, str(report)


@pytest.mark.full(short=["True"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_is_found_again_with_everything_in_it(run_ranks: RunRanks, tmp_path: Path, in_background: bool) -> None:
    before, averages, kept = run_ranks(2, save_run, str(tmp_path / "run"), in_background)[0]
    assert kept == [2, 3]
    for found, loaded_averages, schedule, data, report in run_ranks(3, load_run, str(tmp_path / "run")):
        assert_equal_tensors(found[0], before[0])
        assert_equal_tensors(found[1], before[1])
        assert found[2] == before[2]
        assert_equal_tensors(loaded_averages, averages)
        assert schedule["last_epoch"] == 3
        assert data["sample"] == 9
        assert data["seen"] == [1, (2, "x")]
        assert data["order"].tolist() == list(range(9))
        assert "verified: " in report
        assert "so every rank was seeded anew" in report


def save_on_bad_rank(root: str) -> str:
    class Lost:
        def state_dict(self) -> dict[str, Any]:
            if dist.get_rank() == 1:
                raise OSError("the position file is gone")
            return {"sample": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    model, optimizer = wrap("odd_shapes", 3, 0)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(model, optimizer, root, iteration=1, extra={"data": Lost()})
    return str(caught.value)


def test_an_error_on_one_rank_is_everybodys(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(2, save_on_bad_rank, str(tmp_path))
    assert first == second
    assert "rank 1: OSError: the position file is gone" in first
    assert list(tmp_path.iterdir()) == []
