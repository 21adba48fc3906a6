"""Optimizers that step whole tensors: by an owner of each, and LBFGS on every rank, where nothing is sharded."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import (
    ChainedOptimizer,
    MegatronFSDP,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    steps_whole_tensors,
)
from megatron_fsdp.errors import ConfigurationError, RankError, text_of
from tests.support.api_net import Layer, build, largest_difference, mesh, run_batch, weights
from tests.support.arrangements import divide_tensors, tensor_parallel
from tests.support.case import shard
from tests.support.experts import FLAT, ListedExperts, build_with_experts, experts_of
from tests.support.on_ranks import of_ranks, on_ranks, refusal, same_on_ranks
from tests.support.optimizer_reference import ReferencePair, flat, matrices
from tests.support.zoo import Block, build_dense


@steps_whole_tensors
class Factored(torch.optim.Optimizer):
    """In the manner of Shampoo: factors in a list, a tensor of the parameter's shape, numbers of several kinds.

    It counts steps in its groups, as those of `pytorch_optimizer` do, from the first one on.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.fails = False

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
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
                param.add_(update, alpha=-group["lr"] / group["calls"])


@on_ranks(2)
def test_shards_of_state_keep_no_memory_of_messages_alive() -> None:
    pair = ReferencePair(matrices(), Factored, flat(3))
    for step in range(2):
        pair.step(step)
    shards = [pair.optimizer.state[param]["mean"]._local_tensor for param in pair.params]
    kept = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
    assert sum(kept.values()) == sum(shard.nbytes for shard in shards)


# ---- refusals and failures -------------------------------------------------------------------------------------------


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
    pair = ReferencePair(model, make, {**arrangement.arguments(), **sharding})
    before = [param.full_tensor().clone() for param in pair.params]
    pair.optimizer.fails = dist.get_rank() == 1  # type: ignore[attr-defined]
    told = refusal(pair.step, 0, error=RankError)
    assert re.search("rank 1: MemoryError: no room for the factors.*no weights were changed", told)
    assert all(torch.equal(param.full_tensor(), value) for param, value in zip(pair.params, before, strict=True))
    pair.optimizer.fails = False  # type: ignore[attr-defined]
    pair.step(0)
    assert pair.differing() == []
    with pytest.raises(ValueError, match=r"^Factored.step takes no closure where parameters are sharded"):
        pair.optimizer.step(lambda: 0.0)


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


class Undeclared(torch.optim.Adafactor):
    """A subclass, which may do anything."""


class UndeclaredFactored(Factored):
    """A subclass of a declared class."""


@on_ranks(2)
def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    told = refusal(ReferencePair(matrices(), Holder, flat(3)).step, 0)
    assert "state 'helper' holds a type, which cannot rest with one rank and be saved" in told
    for kind, text in (
        (Undeclared, "Undeclared cannot update sharded parameters: it works on whole tensors"),
        (UndeclaredFactored, "UndeclaredFactored is derived from a class that steps_whole_tensors declares"),
    ):
        model = fully_shard_model(matrices(), mesh(), fsdp_unit_modules=[nn.Linear])
        assert refusal(fully_shard_optimizer, kind(model.parameters())).startswith(text)


SEARCHES: dict[str, dict[str, Any]] = {
    "wolfe": {"line_search_fn": "strong_wolfe", "history_size": 2},
    "fixed": {"lr": 0.3},
}


def lbfgs(params: Any, search: str) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(params, max_iter=4, **SEARCHES[search])


def sharded(search: str) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    return shard(build(), lambda model: lbfgs(model.parameters(), search), fsdp_unit_modules=[Layer], **flat(0))


def step(
    model: nn.Module, optimizer: Any, number: int, around: Callable[[int, Tensor], Tensor] = lambda _, loss: loss
) -> Tensor:
    """Step on one of the batches; `around` gets the number of each call of the closure, and its loss."""
    calls = itertools.count(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.tensor(run_batch(model, number), requires_grad=isinstance(model, MegatronFSDP))  # as with a graph
        return around(next(calls), loss)

    return optimizer.step(closure)  # type: ignore[no-any-return]


@pytest.mark.full(short=["wolfe-2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("search", SEARCHES)
@on_ranks()
def test_lbfgs_steps_as_one_process_and_alike_on_all_ranks(search: str) -> None:
    """All-reduce adds up in an order of its own; line searches look at the mean loss all the same."""
    alone, model, optimizer = build(), *sharded(search)
    alone_optimizer = lbfgs(alone.parameters(), search)
    for number in range(3):
        loss, wanted = step(model, optimizer, number), step(alone, alone_optimizer, number)
        assert torch.allclose(loss, wanted, rtol=0, atol=1e-5)
    found = weights(model)
    same_on_ranks([value.tolist() for value in found.values()])
    assert largest_difference(found, weights(alone)) <= 2e-4


# ---- failures and refusals -------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_closure_that_fails_on_one_rank_fails_on_all() -> None:
    def fails(call: int, loss: Tensor) -> Tensor:
        if call == 2 and dist.get_rank() == 1:
            raise MemoryError("no room for the loss")
        return loss

    model, optimizer = sharded("wolfe")
    told = refusal(step, model, optimizer, 0, fails, error=RankError)
    assert told == "the closure of LBFGS failed (rank 1: MemoryError: no room for the loss)"
    step(model, optimizer, 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), KeyboardInterrupt()], ids=repr)
@on_ranks(3)
def test_a_step_of_lbfgs_that_fails_on_one_rank_fails_on_all(error: BaseException) -> None:
    """In the code of the optimizer itself: between two closures, and after the last one."""
    original = torch.optim.LBFGS._add_grad
    for at in (1, 4):
        (model, optimizer), calls = sharded("fixed"), itertools.count(1)

        def add_grad(*arguments: Any, calls: Iterator[int] = calls, at: int = at) -> None:
            if next(calls) == at and dist.get_rank() == 2:
                raise error
            original(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.LBFGS, "_add_grad", add_grad)
            with pytest.raises((RankError, KeyboardInterrupt)) as raised:
                step(model, optimizer, 0)
        told = of_ranks(text_of(raised.value))
        assert told[0] == told[1] == f"RankError: the step of LBFGS failed (rank 2: {text_of(error)})"
        assert told[2] == ("KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else told[0])


class OwnLBFGS(torch.optim.LBFGS):
    """Somebody's own."""


@on_ranks(4)
def test_what_lbfgs_and_others_cannot_step_is_refused_on_all_ranks() -> None:
    """Before anything is sharded, where fully_shard is given both."""
    refused = "LBFGS cannot update sharded parameters: it works on whole tensors.*zero_dp_strategy=0"
    sparse = "SparseAdam takes sparse gradients alone, and those of a wrapped"
    for strategy, kind in ((1, torch.optim.LBFGS), (3, OwnLBFGS), (3, torch.optim.Rprop), (0, torch.optim.SparseAdam)):
        module = matrices()
        params = list(module.parameters())
        told = refused.replace("LBFGS", kind.__name__) if strategy else sparse
        with pytest.raises(ConfigurationError, match=told):
            fully_shard(module, kind(params), fsdp_unit_modules=[nn.Linear], **flat(strategy))
        assert all(map(operator.is_, module.parameters(), params))
    model = fully_shard_model(matrices(), fsdp_unit_modules=[nn.Linear], **flat(0))
    with pytest.raises(ConfigurationError, match="LBFGS calls its closure several times in a step, and"):
        fully_shard_optimizer(ChainedOptimizer(torch.optim.LBFGS(model.parameters())))
    arrangement, module = tensor_parallel(divide_tensors), build_dense()
    arrangement.place(module)
    arguments = {**arrangement.arguments(), "zero_dp_strategy": 0}
    with pytest.raises(ConfigurationError, match=refused):
        fully_shard(module, torch.optim.LBFGS(module.parameters()), fsdp_unit_modules=[Block], **arguments)
