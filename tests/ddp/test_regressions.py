"""Cases that were wrong once."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_fsdp import DistributedDataParallel
from megatron_fsdp.ddp import DistributedOptimizer
from megatron_fsdp.errors import ShardOperationError
from tests.conftest import RunRanks
from tests.support.case import Scenario, check_strategies, ddp, three_steps
from tests.support.doors import in_buckets
from tests.support.on_ranks import assert_equal_tensors, engine_of, on_ranks
from tests.support.zoo import FEATURES, Batch, ModelCase, Ordered, make_batch, vector_case

OVERLAPPING = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 1,
}


class Table(nn.Module):
    """Holds a parameter and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(FEATURES) + 0.1)


class Reader(nn.Module):
    """Reads a table that others read too."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) @ self.table.weight)


class TwoReaders(nn.Module):
    """The reader that has the table by name runs last."""

    def __init__(self) -> None:
        super().__init__()
        table = Table()
        self.first = Reader(table)
        self.second = Reader(table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(x))


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        (model(torch.full((2, FEATURES), 0.1 * (step + 1))).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(module: nn.Module, fields: dict[str, Any]) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    model = in_buckets(module, fields)
    return model, DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)


class HeadOutside(nn.Module):
    """Has a head that only the loss calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, FEATURES), nn.MultiheadAttention(FEATURES, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def loss_by_head(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens = model(batch.inputs)[:, None]
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    return F.mse_loss(inner.head(tokens, tokens, tokens, need_weights=False)[0].squeeze(1), batch.targets)


@pytest.mark.parametrize(
    "case",
    [vector_case(TwoReaders), ModelCase(HeadOutside, make_batch, loss_by_head, ())],
    ids=["a holder of parameters below several modules", "a head that is called outside of the model"],
)
def test_weights_are_there_for_whoever_reads_them(run_ranks: RunRanks, case: ModelCase) -> None:
    check_strategies(run_ranks, 2, Scenario(three_steps, case), [ddp(**OVERLAPPING)])


@on_ranks(2)
def test_reading_a_weight_too_early_says_why() -> None:
    module = Ordered()

    def looks_at_dtypes(x: torch.Tensor) -> torch.Tensor:
        x = module.first(x.to(module.first.weight.dtype))  # as models of Hugging Face cast
        assert module.last.weight.dtype == torch.float32
        return module.last(module.middle(x))

    module.forward = looks_at_dtypes  # type: ignore[method-assign]
    model, optimizer = wrapped(module, OVERLAPPING)
    trained(model, optimizer, 1)
    with (
        mock.patch.object(module, "forward", lambda x: module.middle(module.first(x)) @ module.last.weight),
        pytest.raises(ShardOperationError) as caught,
    ):
        model(torch.ones(2, FEATURES))
    assert any("leave overlap_param_gather out" in note for note in caught.value.__notes__)
    model.reset()
    trained(model, optimizer, 1)  # it goes on


@on_ranks(2)
def test_a_parameter_can_be_copied_without_its_model_and_sets_are_refused_as_torch_does() -> None:
    model, optimizer = wrapped(nn.Linear(5, 7), {"use_distributed_optimizer": True})
    param = next(model.parameters())
    made = copy.deepcopy(param)
    assert torch.equal(made.full_tensor(), param.full_tensor())
    assert not hasattr(made, "_megatron_fsdp_model")
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(model.parameters())})


@on_ranks(2)
def test_the_buckets_of_the_first_backward_are_given_back() -> None:
    model, optimizer = wrapped(nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]), {**OVERLAPPING, "bucket_size": 42})
    trained(model, optimizer, 1)
    first = model.memory().transient_peak_bytes
    gradients = [group.gradients for group in model.parameter_groups() if group.gradients is not None]
    views = sum(len(found.bucket_views) for found in gradients)  # they would keep the memory
    trained(model, optimizer, 2)
    assert first == model.memory().transient_peak_bytes == 6 * 256 + 128  # aligned buckets, half of one received
    assert (engine_of(model).executor.held_bytes, views) == (0, 0)


@on_ranks(2)
def test_a_step_that_gradients_passed_by_is_told_once() -> None:
    model = in_buckets(nn.Linear(5, 5), {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # not connected
    before = model.full_parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.full_parameters().items())
    assert sum("so nothing was updated" in str(each.message) for each in caught) == (dist.get_rank() == 0)


@on_ranks(2)
def test_ranks_may_defer_unequal_numbers_of_microbatches() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 5)
    model, optimizer = wrapped(copy.deepcopy(plain), {})
    with model.no_sync():
        for _ in range(dist.get_rank() + 1):
            model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(3):
        (plain(torch.ones(2, 5)).square().sum() / 2).backward()
    reference.step()
    assert_equal_tensors(model.full_parameters(), dict(plain.named_parameters()), atol=1e-6)
