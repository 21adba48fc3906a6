"""Weights that are written between a step and the next forward are what computes, also where outer ranks share them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.support.arrangements import hybrid_arguments
from tests.support.on_ranks import on_ranks

pytestmark = pytest.mark.unmerged

POLICIES = {"shared": MixedPrecisionPolicy(main_params_dtype=None), "copied": MixedPrecisionPolicy(torch.float64)}


class Layer(nn.Module):
    """Large enough for a gather to take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(200, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(6)))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 2, 200, generator=torch.Generator().manual_seed(step))[rank]


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two on one model: the second one steps while what the first one changed is on its way."""
    params = list(model.parameters())
    return [torch.optim.SGD(params[::2], lr=0.5), torch.optim.SGD(params[1::2], lr=0.5)]


def shard(strategy: int, policy: MixedPrecisionPolicy) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Sharded inside, and main weights over both axes."""
    model = build()
    return fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=1,
        mixed_precision_policy=policy,
        **hybrid_arguments(2, 2),
    )


@pytest.mark.full(short=["1-shared", "3-copied"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(4)
def test_writes_after_a_step_are_not_lost(strategy: int, policy: str) -> None:
    plain = build()
    model, _first = shard(strategy, POLICIES[policy])
    theirs, ours = optimizers(plain), optimizers(model)
    found = []
    for step in range(3):
        for rank in range(4):
            (plain(batch(step, rank)).square().mean() / 4).backward()
        model(batch(step, dist.get_rank())).square().mean().backward()
        for each in (*theirs, *ours):
            each.step()
            each.zero_grad()
        with torch.no_grad():
            for param in (*plain.parameters(), *model.parameters()):
                param.clamp_(-0.03, 0.03)
            found.append((model(batch(99, 0)) - plain(batch(99, 0))).abs().max().item())
    assert max(found) < 1e-5


@on_ranks(4)
def test_nothing_writes_into_weights_between_a_step_and_the_next_forward() -> None:
    """The gather over the outer axis is in place: while it is under way it would undo what others write."""
    model, optimizer = shard(3, MixedPrecisionPolicy())

    def count() -> int:
        return model.traffic_by_axis()["dp_outer"].gathers

    model(batch(0, dist.get_rank())).square().mean().backward()
    seen = [count()]
    optimizer.step()
    seen.append(count())
    loss = model(batch(1, dist.get_rank())).square().mean()
    seen.append(count())
    loss.backward()
    seen.append(count())
    assert seen == [0, 0, 6, 6]


@on_ranks(4)
def test_a_gather_that_writes_around_main_weights_may_not_run_between_steps() -> None:
    may = {policy: shard(3, POLICIES[policy])[0].may_gather_between_steps for policy in POLICIES}
    assert may == {"shared": False, "copied": True}
