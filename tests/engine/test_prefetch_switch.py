"""`suggested_AG_prefetch_size`: 0 gathers on demand, anything else units ahead; results are the same."""

import pytest
import torch
from torch import Tensor

from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from megatron_fsdp.engine.schedule import Action, Operation
from tests.conftest import RunRanks
from tests.support.api_net import Layer, build, largest_difference, mesh, train, weights
from tests.support.seams import engine_of


def train_with(numel: int) -> tuple[int, int, list[str], dict[str, Tensor]]:
    """What the two sizes say, the gathers and waits of a steady step, and the trained weights."""
    model = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.suggested_AG_prefetch_size = numel
    train(model, optimizer, 2)
    seen: list[str] = []
    run = engine_of(model).executor.run

    def note(operations: tuple[Operation, ...], defer: bool = False) -> None:
        seen.extend(str(each) for each in operations if each.action in (Action.GATHER, Action.WAIT))
        run(operations, defer)

    engine_of(model).executor.run = note  # type: ignore[method-assign, assignment]
    train(model, optimizer, 1, first=2)
    return model.suggested_AG_prefetch_size, model.suggested_RS_queue_capacity, seen, weights(model)


@pytest.fixture(scope="module")
def outcomes(run_ranks: RunRanks) -> dict[int, tuple[int, int, list[str], dict[str, Tensor]]]:
    return {numel: run_ranks(2, train_with, numel)[0] for numel in (0, 10**9)}


def test_zero_waits_for_each_gather_at_once(outcomes: dict[int, tuple[int, int, list[str], dict[str, Tensor]]]) -> None:
    size, _, seen, _ = outcomes[0]
    assert size == 0
    gathers, waits = seen[::2], seen[1::2]
    assert [each.split("@")[0].replace("gather", "wait") for each in gathers] == waits


def test_otherwise_the_next_unit_is_gathered_before_the_wait(
    outcomes: dict[int, tuple[int, int, list[str], dict[str, Tensor]]],
) -> None:
    size, capacity, seen, _ = outcomes[10**9]
    assert seen[:4] == ["gather0", "gather1@0", "gather2@1", "wait0"]  # both units fit
    assert capacity == size > 0  # two units ahead, two buckets


def test_the_weights_are_the_same(outcomes: dict[int, tuple[int, int, list[str], dict[str, Tensor]]]) -> None:
    assert largest_difference(outcomes[0][3], outcomes[10**9][3]) == 0.0
