"""A rank that fails anywhere in a step with an exchange, for lack of memory or in a hook: one sentence on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.errors import RankError
from megatron_fsdp.optim.full_tensor import exchange, muon
from megatron_fsdp.optim.full_tensor import step as full_tensor_step
from tests.optim.full_tensor.test_step import Factored
from tests.support.on_ranks import of_ranks, on_ranks, same_on_ranks
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

    def __init__(self, patch: pytest.MonkeyPatch, place: tuple[Any, str], at: int | None) -> None:
        self._original, self._at, self.calls = getattr(*place), at, 0
        patch.setattr(*place, lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self._at and dist.get_rank() == dist.get_world_size() - 1:
            raise MemoryError("no room")
        return self._original(*args, **kwargs)


def factored(params: Sequence[Any]) -> torch.optim.Optimizer:
    return Factored(params)


def one_muon(params: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.1)


def fail_everywhere(make: Callable[[Sequence[Any]], torch.optim.Optimizer], places: dict[str, tuple[Any, str]]) -> None:
    """Fail on the last rank at the first, a middle and the last call of each function in a step, in waves of one."""
    last = dist.get_world_size() - 1
    pair = ReferencePair(matrices(), make, flat(3))
    for place in places.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(muon, "WAVE_BYTES", 1)
            counted = Fault(patch, place, at=None)
            pair.step(0)
        calls = of_ranks(counted.calls)[last]
        assert calls
        for at in sorted({1, (calls + 1) // 2, calls}):
            before = [param.full_tensor().clone() for param in pair.params]  # type: ignore[attr-defined]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(muon, "WAVE_BYTES", 1)
                Fault(patch, place, at)
                with pytest.raises(RankError) as raised:
                    pair.step(0)
            assert same_on_ranks(str(raised.value)) == (
                f"the optimizer's step failed (rank {last}: MemoryError: no room); no weights were changed on any rank"
            )
            assert all(
                torch.equal(param.full_tensor(), value)  # type: ignore[attr-defined]
                for param, value in zip(pair.params, before, strict=True)
            )
    fresh = ReferencePair(matrices(), make, flat(3))
    for number in range(2):
        fresh.step(number)
        assert fresh.differing() == []


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_muon_fails_together_wherever_memory_ends() -> None:
    fail_everywhere(one_muon, {**PLACES, **MUON})


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_a_step_of_whole_tensors_fails_together_wherever_memory_ends() -> None:
    fail_everywhere(factored, {**PLACES, "new state": (full_tensor_step, "_described")})
