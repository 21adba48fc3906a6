"""Weights that are changed between a forward and its backward: refused, since others compute with them by then."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ScheduleError
from tests.conftest import RunRanks


def build() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def data(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-3.0)


def by_step(model: nn.Module) -> None:
    """An optimizer that nobody told the model of."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.5, foreach=True).step()
    for param in model.parameters():
        param.grad = None


CHANGES: dict[str, Callable[[nn.Module], None]] = {"by hand": by_hand, "step": by_step}


def _changed_between(change: str, strategy: int) -> list[str | float]:
    """What the backward of the forward before raises; then the error of a gradient of the changed weights."""
    rank, found = dist.get_rank(), list[str | float]()
    model, alone = fully_shard_model(build(), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy), build()
    loss = model(data(rank)).square().sum()
    CHANGES[change](model)
    CHANGES[change](alone)
    try:
        loss.backward()
    except ScheduleError as error:
        found.append(str(error))
    model.reset()
    model.zero_grad()
    model(data(rank)).square().sum().backward()
    (sum(alone(data(each)).square().sum() for each in (0, 1)) / 2).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    found.append(max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs))
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strategy", [2, 3])
def test_a_backward_with_other_weights_than_its_forward_is_refused(
    run_ranks: RunRanks, change: str, strategy: int
) -> None:
    for told, error in run_ranks(2, _changed_between, change, strategy):
        assert "a forward that ran before the weights were changed" in told
        assert error < 1e-5
