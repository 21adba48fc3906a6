"""Ranks without data for a unit, or without a batch at all, take part; training equals one process."""

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.case import STRATEGIES as ALL
from tests.support.case import Run, Scenario, check_strategies
from tests.support.on_ranks import on_ranks
from tests.support.zoo import Experts, Layer, Nested, Ordered, let_take_part, vector_case

EXPERTS = vector_case(Experts)


def train_experts(run: Run) -> None:
    let_take_part(run.model)
    run.train(0, 1, 2)


def test_experts_without_samples_on_some_ranks_train_as_one_process(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 3, Scenario(train_experts, EXPERTS), ALL[::3])


def defer_everything_then_sync(run: Run) -> None:
    """Nothing but `finish_grad_sync` reduces: ranks that only took part have to reduce zeros then."""
    let_take_part(run.model)
    with run.no_sync():
        run.backward(0, 1)
    if run.sharded is not None:
        run.sharded.finish_grad_sync()
    run.step()


def test_unreduced_gradients_of_units_that_some_ranks_skipped_are_reduced_on_all(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 2, Scenario(defer_everything_then_sync, EXPERTS), ALL[1::2])


# ---- whole forwards ------------------------------------------------------------------------------------------------


def last_rank_runs_dry(run: Run) -> None:
    """From the second step on the last rank has no batch; the gradient is the mean with zeros from it."""
    for step in range(3):
        for rank in run.ranks_here:
            dry = step > 0 and rank == run.num_ranks - 1
            if not dry:
                run.backward_of(rank, step)
            elif run.sharded is not None:
                loss = run.sharded.take_part()
                assert loss.item() == 0.0
                loss.backward()
        run.step()


@pytest.mark.full(short=["Nested-2"])
@pytest.mark.parametrize(("build", "num_ranks"), [(Ordered, 4), (Nested, 2)])
def test_a_rank_without_a_batch_counts_as_zeros(run_ranks: RunRanks, num_ranks: int, build: type[nn.Module]) -> None:
    settings = ALL if build is Ordered else ALL[:3]  # the helper of Nested is used twice, which no registration tells
    check_strategies(run_ranks, num_ranks, Scenario(last_rank_runs_dry, vector_case(build)), settings)


def other_order(run: Run) -> None:
    """The forward runs layers in another order than they are registered in, and one of them twice."""
    run.module.order = (3, 1, 0, 1, 2)  # type: ignore[assignment]
    run.train(0)
    for rank in run.ranks_here:
        if rank:
            run.backward_of(rank, 1)
        elif run.sharded is not None:
            layers = run.module.layers
            run.sharded.take_part(order=[layers[i] for i in (3, 1, 0, 1, 2)]).backward()  # type: ignore[index]
    run.step()


def test_the_order_of_a_whole_forward_can_be_told(run_ranks: RunRanks) -> None:
    check_strategies(run_ranks, 3, Scenario(other_order, vector_case(Ordered)), ALL[1::2])


def _build_frozen() -> Experts:
    model = Experts()
    model.floors[1].requires_grad_(requires_grad=False)
    return model


def test_frozen_units_that_some_ranks_skip(run_ranks: RunRanks) -> None:
    """A frozen expert passes gradients on to what lies before it, and is gathered for that."""
    check_strategies(run_ranks, 2, Scenario(train_experts, vector_case(_build_frozen)), ALL[::3])


@on_ranks(2)
def test_foreign_modules_and_tensors_without_gradient_are_refused() -> None:
    model = fully_shard_model(Ordered(), fsdp_unit_modules=[Layer])
    with pytest.raises(ConfigurationError, match="a Linear that is not part of the sharded model"):
        model.take_part(nn.Linear(1, 1))
    with pytest.raises((ConfigurationError, ScheduleError), match=r"a tensor of torch\.int64, which carries no"):
        model.take_part(model.module.layers[0], torch.ones(2, dtype=torch.int64))
