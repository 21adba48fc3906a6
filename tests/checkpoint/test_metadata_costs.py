"""What saving and loading cost besides the data: no collective per tensor, only torch's own few."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp import fully_shard
from tests.conftest import RunRanks


class Collectives(TorchDispatchMode):
    """Counts what process groups are asked to do, whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def count(call: Any) -> tuple[int, Any]:
    with Collectives() as seen:
        result = call()
    return seen.count, result


def costs(layers: int, folder: str) -> dict[str, int]:
    assert count(lambda: dist.barrier())[0] == 1
    model = nn.Sequential(
        *(nn.Linear(3, 5, bias=False) if i % 2 == 0 else nn.Linear(5, 3, bias=False) for i in range(layers))
    )
    wrapped, optimizer = fully_shard(model, torch.optim.Adam(model.parameters()), fsdp_unit_modules=[])
    wrapped(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    found: dict[str, int] = {}
    found["model"], state = count(wrapped.state_dict)
    found["optimizer"], optimizer_state = count(optimizer.state_dict)
    both = {"model": state, "optimizer": optimizer_state}
    found["plan"], plan = count(lambda: create_default_local_save_plan(state, dist.get_rank() == 0))
    assert plan.items
    found["save"], _ = count(lambda: dcp.save(both, checkpoint_id=folder))
    found["load"], _ = count(lambda: dcp.load(both, checkpoint_id=folder))
    found["into model"], _ = count(lambda: wrapped.load_state_dict(both["model"]))
    found["into optimizer"], _ = count(lambda: optimizer.load_state_dict(both["optimizer"]))
    return found


def test_collectives_do_not_grow_with_the_number_of_tensors(run_ranks: RunRanks, tmp_path: Path) -> None:
    few = run_ranks(2, costs, 10, str(tmp_path / "few"))
    many = run_ranks(2, costs, 100, str(tmp_path / "many"))
    assert few == many
    for found in few:
        own = {what: found[what] for what in ("model", "optimizer", "plan", "into model", "into optimizer")}
        assert own == dict.fromkeys(own, 0)
        assert 0 < found["save"] < 20
        assert 0 < found["load"] < 20


class Hollow(nn.Module):
    """Parameters without elements, and one with."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.some = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.some.sum() + self.none.sum()


def hollow(strategy: int, folder: str) -> list[bool]:
    model = Hollow()
    wrapped, optimizer = fully_shard(model, torch.optim.Adam(model.parameters()), zero_dp_strategy=strategy)
    wrapped(torch.ones(2)).sum().backward()
    optimizer.step()
    state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    before = wrapped.full_parameters()
    with torch.no_grad():
        for param in wrapped.parameters():
            param.zero_()
    dcp.load(state, checkpoint_id=folder)
    wrapped.load_state_dict(state["model"])
    after = wrapped.full_parameters()
    return [torch.equal(before[name], after[name]) for name in before]


@pytest.mark.parametrize("strategy", [0, 3])
def test_tensors_without_elements_are_saved_and_loaded(run_ranks: RunRanks, tmp_path: Path, strategy: int) -> None:
    for same in run_ranks(2, hollow, strategy, str(tmp_path / "saved")):
        assert same == [True, True]
