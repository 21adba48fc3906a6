"""A rank that fails anywhere in a step with an exchange, for lack of memory or in a hook: one sentence on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import AdamW8bit, ChainedOptimizer
from megatron_fsdp.errors import RankError, text_of
from megatron_fsdp.optim.full_tensor import exchange, muon
from megatron_fsdp.optim.full_tensor import step as full_tensor_step
from tests.optim.full_tensor.test_step import Factored
from tests.support.on_ranks import fixed_seed, of_ranks, on_ranks, refusal
from tests.support.optimizer_reference import ReferencePair, flat, matrices

PLACES: dict[str, tuple[Any, str]] = {
    "messages": (exchange.Messages, "__init__"),
    "packing of shards": (exchange.Messages, "pack_shards"),
    "whole tensors": (exchange, "cut_up"),
    "packing of results": (exchange.Messages, "pack_results"),
}
MUON = {
    "plan": (muon.MuonStep, "_waves"),
    "momentum": (muon._Matrix, "operand"),
    "messages of all waves": (muon, "_reserve"),
    "iteration": (muon, "_zeropower_via_newtonschulz"),
}


class Fault:
    """A function that fails at one of its calls on one rank; counts them on all."""

    def __init__(
        self, patch: pytest.MonkeyPatch, place: tuple[Any, str], at: int | None, error: BaseException | None = None
    ) -> None:
        self._original, self._at, self.calls = getattr(*place), at, 0
        self._error = error or MemoryError("no room")
        patch.setattr(*place, lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self._at and dist.get_rank() == dist.get_world_size() - 1:
            raise self._error
        return self._original(*args, **kwargs)


def factored(params: Sequence[Any]) -> torch.optim.Optimizer:
    return Factored(params)


def one_muon(params: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.1)


def fail_everywhere(make: Callable[[Sequence[Any]], torch.optim.Optimizer], places: dict[str, tuple[Any, str]]) -> None:
    """Fail on the last rank at the first and the last call of each function in a step, in waves of one."""
    last = dist.get_world_size() - 1
    pair = ReferencePair(matrices(), make, flat(3))
    for place in places.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(muon, "WAVE_BYTES", 1)
            counted = Fault(patch, place, at=None)
            pair.step(0)
        calls = of_ranks(counted.calls)[last]
        assert calls
        for at, error in ((1, KeyboardInterrupt()), (1, MemoryError("no room")), (calls, MemoryError("no room"))):
            before = [param.full_tensor().clone() for param in pair.params]  # type: ignore[attr-defined]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(muon, "WAVE_BYTES", 1)
                Fault(patch, place, at, error)
                with pytest.raises((RankError, KeyboardInterrupt)) as raised:
                    pair.step(0)
            told = of_ranks(text_of(raised.value))
            words = f"the optimizer's step failed (rank {last}: {text_of(error)}); no weights were changed on any rank"
            own = error if isinstance(error, KeyboardInterrupt) else RankError(words)
            assert told == [f"RankError: {words}"] * last + [text_of(own)]
            assert all(
                torch.equal(param.full_tensor(), value)  # type: ignore[attr-defined]
                for param, value in zip(pair.params, before, strict=True)
            )
    fresh = ReferencePair(matrices(), make, flat(3))
    for number in range(2):
        fresh.step(number)
        assert fresh.differing() == []


@on_ranks(2)
def test_muon_fails_together_wherever_memory_ends() -> None:
    fail_everywhere(one_muon, {**PLACES, **MUON})


@on_ranks(3)
def test_a_step_of_whole_tensors_fails_together_wherever_memory_ends() -> None:
    fail_everywhere(factored, {**PLACES, "new state": (full_tensor_step, "_described")})


def eight_bit(params: Sequence[Any]) -> torch.optim.Optimizer:
    return AdamW8bit(params, lr=0.1)


def chained(params: Sequence[Any]) -> torch.optim.Optimizer:
    return ChainedOptimizer(torch.optim.SGD(params[:1], lr=0.1), torch.optim.Muon(params[1:], lr=0.1))


def wide() -> nn.Module:
    """Matrices whose shards end inside of blocks of 256 elements."""
    with fixed_seed(3):
        return nn.Sequential(nn.Linear(20, 29, bias=False), nn.Linear(29, 20, bias=False))


def fail_on_the_last(*_arguments: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("no such metric")


TROUBLES = [
    pytest.param(make, trouble, id=f"{trouble}-{make.__name__}")
    for trouble in ("earlier", "hook", "rate")
    for make in (one_muon, factored, eight_bit, chained)
    if (make, trouble) != (factored, "rate")  # of two matrices the third rank steps none, and so reads no rate
]


@pytest.mark.full(short=["hook-chained", "earlier-one_muon", "rate-eight_bit", "hook-factored"])
@pytest.mark.parametrize(("make", "trouble"), TROUBLES)
@on_ranks(3)
def test_a_hook_or_a_rate_that_fails_on_one_rank_fails_on_all(
    make: Callable[[Sequence[Any]], torch.optim.Optimizer], trouble: str
) -> None:
    """Before the exchange of a step; one that does not fail then is right."""
    handles = []

    def made(params: Sequence[Any]) -> torch.optim.Optimizer:
        optimizer = make(params)
        if trouble == "earlier" and isinstance(params[0], DTensor):  # than connected
            handles.append(optimizer.register_step_pre_hook(fail_on_the_last))
        return optimizer

    pair = ReferencePair(wide(), made, flat(3))
    group = pair.optimizer.param_groups[-1]
    rate = group["lr"]
    if trouble == "hook":
        handles.append(pair.optimizer.register_step_pre_hook(fail_on_the_last))
    elif trouble == "rate" and dist.get_rank() == 2:
        group["lr"] = "fast"
    assert "rank 2" in refusal(pair.step, 0, error=RankError)
    group["lr"] = rate
    for handle in handles:
        handle.remove()
    if make is not chained:  # whose SGD has stepped where there was no trouble
        pair.step(0)
        assert pair.differing() == []
