"""Weights that are changed between a forward and its backward: refused, since others compute with them by then."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.shm.futex import has_futex
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


class Renormed(nn.Module):
    """An embedding that torch scales down in place when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(x)
        return found


def _written_inside(has_main_weights: bool) -> tuple[str, float]:
    """What a write inside of a forward raises, and how far the next forward is from that of the initial weights."""
    torch.manual_seed(2)
    module = Renormed().to(torch.bfloat16 if has_main_weights else torch.float32)
    module.table.weight.data.fill_(2.0)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    model = fully_shard_model(nn.Sequential(module), fsdp_unit_modules=[Renormed], mixed_precision_policy=policy)
    told = ""
    try:
        model(torch.arange(6))
    except ScheduleError as error:
        told = str(error)
    module.table.max_norm = None
    dist.barrier()
    model.install_optimized_model_weights()
    return told, (model(torch.arange(6)).float() - 2.0).abs().max().item()


@pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")
@pytest.mark.parametrize("has_main_weights", [True, False])
def test_a_write_inside_of_a_forward_tells_what_has_become_of_it(run_ranks: RunRanks, has_main_weights: bool) -> None:
    remedy = "load or set the weights again"
    if has_main_weights:
        remedy = "call install_optimized_model_weights() when all have met this error, since main weights are unchanged"
    for told, error in run_ranks(2, _written_inside, has_main_weights):
        assert told == (
            "0.table.weight was modified in place inside the forward of unit 0, and so, in memory that ranks share, "
            f"for all of them while they computed; {remedy}; modify parameters between forwards instead"
        )
        assert (error == 0.0) is has_main_weights
