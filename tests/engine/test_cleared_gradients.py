"""Memory of cleared gradients goes back, comes again beneath the same tensors, and stays where somebody kept one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP
from tests.support.case import adamw_above_noise, shard
from tests.support.on_ranks import engine_of, local_of, on_ranks
from tests.support.zoo import TOWER_FEATURES, Tower, tower_case, tower_loss

WIDTHS = (8, 16, 8)
X = torch.ones(2, TOWER_FEATURES)


def gradient_bytes(model: MegatronFSDP) -> int:
    """What main gradients take now."""
    return sum(group.gradients.main.held_bytes for group in model.parameter_groups() if group.gradients is not None)


def wrap(**options: object) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    return shard(tower_case(WIDTHS), adamw_above_noise, **options)


def backward(model: nn.Module) -> None:
    tower_loss(model, X).backward()


def look(model: nn.Module) -> None:
    """A forward, after which what was cleared has gone."""
    with torch.no_grad():
        model(X)


def largest(model: nn.Module) -> nn.Parameter:
    return max(model.parameters(), key=lambda each: each.to_local().numel())


def values(tensor: torch.Tensor) -> list[float]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone().flatten().tolist()


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("way", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_cleared_gradients_take_nothing_and_come_back_as_the_same_tensors(way: str, strategy: int) -> None:
    model, optimizer = wrap(zero_dp_strategy=strategy)
    numel = sum(param.numel() for param in Tower(WIDTHS).parameters())
    views = set()
    for _ in range(3):
        backward(model)
        views.add(sum(id(param.grad) for param in model.parameters()))
        assert gradient_bytes(model) == 4 * numel // (2 if strategy else 1)
        optimizer.step()
        if way == "by hand":
            for param in model.parameters():
                param.grad = None
        else:
            (optimizer if way == "optimizer" else model).zero_grad()
        look(model)
        assert gradient_bytes(model) == 0
    assert len(views) == 1


def storage_of(grad: DTensor) -> torch.Tensor:
    """A tensor of another kind over the same memory."""
    flat = grad.to_local().detach()
    return torch.empty(0).set_(flat.untyped_storage(), flat.storage_offset(), (flat.numel(),))


KEPT: dict[str, Callable[[DTensor], torch.Tensor]] = {
    "whole": lambda grad: grad,
    "local": DTensor.to_local,
    "inner": local_of,
    "part": lambda grad: grad.to_local()[:1],
    "storage": storage_of,
}


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_a_gradient_that_somebody_kept_stays_as_it_was(strategy: int) -> None:
    for kept, keep in KEPT.items():
        model, optimizer = wrap(zero_dp_strategy=strategy)
        backward(model)
        param = largest(model)
        mine = keep(param.grad)
        before = values(mine)
        assert any(before)
        optimizer.zero_grad()
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(2.0)
        backward(model)
        renewed = values(keep(param.grad))
        assert renewed != before
        optimizer.zero_grad()
        backward(model)
        assert values(mine) == before, kept
        assert values(keep(param.grad)) == renewed, kept


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_a_gradient_that_a_graph_saved_stays_as_it_was(strategy: int) -> None:
    model, optimizer = wrap(zero_dp_strategy=strategy)
    backward(model)
    param = largest(model)
    expected = values(param.grad)
    factor = param.grad.detach().clone().requires_grad_()
    product = factor * param.grad  # to which only the product's graph refers
    optimizer.zero_grad()
    torch.autograd.backward(product, torch.ones_like(product))
    assert any(expected)
    assert values(factor.grad) == expected


@on_ranks(2)
def test_a_group_keeps_its_memory_while_one_parameter_shows_a_gradient() -> None:
    model, _ = wrap()
    backward(model)
    first, *others = model.parameters()
    before = values(first.grad)
    for param in others:
        param.grad = None
    look(model)
    group, _ = engine_of(model).group_and_index[id(first)]
    assert gradient_bytes(model) == group.gradients.main.num_bytes > 0
    assert values(first.grad) == before


@on_ranks(2)
def test_sums_that_are_not_shown_yet_are_not_given_back() -> None:
    found = []
    for looks in (True, False):
        model, _ = wrap()
        model.set_model_auto_sync(False)
        backward(model)
        if looks:
            look(model)
            between = gradient_bytes(model)
        model.set_model_auto_sync(True)
        backward(model)
        found.append([values(param.grad) for param in model.parameters()])
    assert between == gradient_bytes(model) > 0
    assert found[0] == found[1]
