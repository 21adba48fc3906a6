"""Linears that write weight gradients straight into the bucket train as one process does."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import RunRanks
from tests.support.ddp_run import DdpSetting, ddp
from tests.support.models import Batch, ModelCase
from tests.support.sharded_run import Run, Scenario, Setting, check_jobs, check_strategies
from tests.support.usage_models import Recomputed, vector_case

FUSED = (("gradient_accumulation_fusion", True),)
WIDTH = 8


def _settings(*strategies: int) -> list[Setting]:
    return [Setting(strategy, options=FUSED) for strategy in strategies]


def steps_of_all_kinds(run: Run) -> None:
    """A plain step, one with a deferred microbatch, and one of two forwards with a backward each and together."""
    run.train(0)
    with run.no_sync():
        run.loss(1).backward()
    run.loss(2).backward()
    run.step()
    losses = [run.loss(3), run.loss(4), run.loss(5)]
    (losses[0] + losses[1]).backward()
    losses[2].backward()
    run.step()


class Usual(nn.Module):
    """What a block may do with linears: none of these is without a weight gradient.

    A tied pair, a linear that is called twice, a weight that is also read by itself, a frozen one, one without a bias,
    one behind a frozen input, one that is never called, one that two calls of three skip, a subclass, one of one row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.frozen_weight = nn.Linear(WIDTH, WIDTH)
        self.frozen_weight.weight.requires_grad_(False)
        self.tied = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.tied[1].weight = self.tied[0].weight
        self.never = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.own = OwnLinear(WIDTH, WIDTH)
        self.row = nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        y = y + self.read(x.detach()) + 0.1 * self.read.weight.square().sum()
        y = y + self.tied[1](torch.tanh(self.tied[0](self.frozen(x)))) + self.frozen_weight(y)
        self.calls += 1
        if self.calls % 3 == 0:
            y = y + self.sometimes(x.transpose(0, 1)).transpose(0, 1)  # not contiguous
        return x + self.own(y) * self.row(y)


class OwnLinear(nn.Linear):
    """A subclass, whose forward may do anything."""


class Matrices(nn.Module):
    """Blocks between two linears, on samples of a (3, WIDTH) matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Usual() for _ in range(2))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean(1))


def _matrices(samples: int, generator: torch.Generator) -> Batch:
    return Batch(torch.randn(samples, 3, 5, generator=generator), torch.randn(samples, 2, generator=generator))


def _squares(module: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(module(batch.inputs), batch.targets)


MATRICES = ModelCase(Matrices, _matrices, _squares, (Usual,))


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_training_equals_one_process(run_ranks: RunRanks, num_ranks: int) -> None:
    check_strategies(run_ranks, num_ranks, Scenario(steps_of_all_kinds, MATRICES), _settings(0, 1, 2, 3))


@pytest.mark.full(short=["True"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_equals_one_process(run_ranks: RunRanks, reentrant: bool) -> None:
    case = vector_case(partial(Recomputed, "pairs", reentrant))
    check_strategies(run_ranks, 2, Scenario(steps_of_all_kinds, case), _settings(2, 3))


BUCKETS: list[DdpSetting] = [
    ddp(gradient_accumulation_fusion=True, bucket_size=90, **fields)
    for fields in (
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True},
        {"overlap_grad_reduce": False, "use_distributed_optimizer": True, "average_in_collective": True},
        {"overlap_grad_reduce": True, "gradient_reduce_div_fusion": False},
    )
]


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_buckets_equal_one_process(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = vector_case(partial(Recomputed, "pairs", False))
    jobs = [(Scenario(steps_of_all_kinds, MATRICES), setting) for setting in BUCKETS]
    check_jobs(run_ranks, num_ranks, [*jobs, (Scenario(steps_of_all_kinds, plain), BUCKETS[1])])
