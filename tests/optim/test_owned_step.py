"""Optimizers that need whole tensors, stepped by owners: what one process computes, bit for bit, state included."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model, fully_shard_optimizer, steps_whole_tensors
from megatron_fsdp.errors import ConfigurationError, RankError
from tests.conftest import RunRanks
from tests.support.api_net import mesh, message_of
from tests.support.experts import FLAT, ListedExperts, build_with_experts, experts_of
from tests.support.models import Block
from tests.support.on_ranks import on_ranks, same_on_ranks
from tests.support.optimizer_twins import Twins, flat, matrices


@steps_whole_tensors
class Factored(torch.optim.Optimizer):
    """In the manner of Shampoo: factors in a list, a tensor of the parameter's shape, numbers of several kinds."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})
        self.fails = False

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                if self.fails:
                    raise MemoryError("no room for the factors")
                state = self.state[param]
                if not state:
                    sides = [torch.zeros(n, n, dtype=param.dtype) for n in param.shape]
                    state.update(step=0, beat=torch.tensor(0.0), mean=torch.zeros_like(param), factors=sides)
                state["step"] += 1
                state["beat"] += 0.5
                state["mean"].lerp_(param.grad, 0.1)
                state["factors"] = [
                    side + torch.tensordot(param.grad, param.grad, dims=([1 - dim], [1 - dim]))
                    for dim, side in enumerate(state["factors"])
                ]
                left, right = (factor + torch.eye(len(factor)) for factor in state["factors"])
                update = torch.linalg.solve(left, state["mean"]) @ torch.linalg.inv(right)
                param.add_(update, alpha=-group["lr"])


# ---- refusals and failures -------------------------------------------------------------------------------------------


def failures(ranks: tuple[int, ...]) -> list[tuple[str, str]]:
    """A step that fails on some ranks, one that succeeds, and one with a closure."""
    found = []
    fails = dist.get_rank() in ranks
    twins = Twins(matrices(), Factored, flat(3))
    before = [param.full_tensor().clone() for param in twins.params]
    twins.optimizer.fails = fails  # type: ignore[attr-defined]
    try:
        twins.step(0)
    except RuntimeError as error:
        found.append(message_of(error))
    assert all(torch.equal(param.full_tensor(), value) for param, value in zip(twins.params, before, strict=True))
    twins.optimizer.fails = False  # type: ignore[attr-defined]
    twins.step(0)
    assert twins.differing() == []
    try:
        twins.optimizer.step(lambda: 0.0)
    except ValueError as error:
        found.append(message_of(error))
    return found


@on_ranks(4)
def test_a_step_over_two_meshes_that_fails_on_one_rank_fails_on_all() -> None:
    """A step over two meshes, of dense parameters and of experts, that fails on rank 1 and then succeeds."""
    arrangement = experts_of(FLAT)
    model = build_with_experts(kind=ListedExperts)
    arrangement.place(model)
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)

    def make(params: Sequence[Any]) -> torch.optim.Optimizer:
        return Factored([param for param in params if param.dim() == 2])

    sharding = {"zero_dp_strategy": 3, "fsdp_unit_modules": [Block]}
    twins = Twins(model, make, {**arrangement.arguments(), **sharding})
    before = [param.full_tensor().clone() for param in twins.params]
    twins.optimizer.fails = dist.get_rank() == 1  # type: ignore[attr-defined]
    with pytest.raises(
        RankError, match=r"rank 1: MemoryError: no room for the factors.*no weights were changed"
    ) as raised:
        twins.step(0)
    same_on_ranks(str(raised.value))
    assert all(torch.equal(param.full_tensor(), value) for param, value in zip(twins.params, before, strict=True))
    twins.optimizer.fails = False  # type: ignore[attr-defined]
    twins.step(0)
    assert twins.differing() == []
    with pytest.raises(ValueError, match=r"^Factored.step takes no closure where parameters are sharded"):
        twins.optimizer.step(lambda: 0.0)


@steps_whole_tensors
class Holder(torch.optim.Optimizer):
    """Keeps an object of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["helper"] = Holder


def hold() -> tuple[str, str] | None:
    try:
        Twins(matrices(), Holder, flat(3)).step(0)
    except RuntimeError as error:
        return message_of(error)
    return None


class Undeclared(torch.optim.Adafactor):
    """A subclass, which may do anything."""


class UndeclaredFactored(Factored):
    """A subclass of a declared class."""


def connect_undeclared(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> tuple[str, str] | None:
    model = fully_shard_model(matrices(), mesh(), fsdp_unit_modules=[nn.Linear], **options)
    try:
        fully_shard_optimizer(kind(model.parameters()))
    except ValueError as error:
        return message_of(error)
    return None


def test_what_cannot_be_right_is_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, hold)
    assert first == second
    assert "state 'helper' holds a type, which cannot rest with one rank and be saved" in first[1]
    refused: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any], str], ...] = (
        (Undeclared, {}, "Undeclared cannot update sharded parameters: it works on whole tensors"),
        (UndeclaredFactored, {}, "UndeclaredFactored is derived from a class that steps_whole_tensors declares"),
        (Factored, {"use_decoupled_grad": True}, "with use_decoupled_grad=True gradients are in param.decoupled_grad"),
    )
    for kind, options, text in refused:
        first, second = run_ranks(2, connect_undeclared, kind, options)
        assert first == second
        assert first[1].startswith(text)


def test_only_classes_of_optimizers_can_be_declared() -> None:
    for given in (Factored([nn.Parameter(torch.ones(2, 2))]), nn.Linear, lambda params: Factored(params)):
        with pytest.raises(ConfigurationError, match="give a class of optimizers, not an object or a function"):
            steps_whole_tensors(given)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="steps sharded matrices as it is"):
        steps_whole_tensors(torch.optim.Muon)
