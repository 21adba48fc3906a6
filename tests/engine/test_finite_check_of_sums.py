"""Infinity that local sums or casts make of finite gradients is reported where it would travel; training goes on."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.errors import NonFiniteGradientError
from tests.conftest import RunRanks

HALF_SUM = ({}, torch.float16, 6e4, 2)  # two finite microbatches, and their sum is above the largest float16
HALF_WIRE = ({"megatron_fsdp_grad_comm_dtype": "fp16"}, torch.float32, 1e6, 1)
HALF_MAIN = ({"megatron_fsdp_main_grads_dtype": "fp16"}, torch.float32, 1e6, 1)
NAMED = "the gradients of 1 parameters hold NaN or infinity before reduction: 1.weight (bucket 1) on rank [1] (global"


class Case:
    """A model of two weights, of which the second's gradient is the input of the batch; one rank's may be large."""

    def __init__(self, fields: dict[str, Any], dtype: torch.dtype, by_hand: bool) -> None:
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(dtype)
        with torch.no_grad():
            net[0].weight.fill_(1.0)
            net[1].weight.fill_(2.0**-13)  # the gradient of the first weight stays small
        self.model = DistributedDataParallel(DistributedDataParallelConfig(check_for_nan_in_grad=True, **fields), net)
        self.dtype, self.by_hand = dtype, by_hand

    def step(self, value: float, microbatches: int) -> str:
        """One step up to its gradients; returns where what was raised, and what."""
        x = torch.full((1, 1), value, dtype=self.dtype)
        where = ""
        try:
            for number in range(microbatches):
                where = f"microbatch {number}"
                deferring = self.by_hand or number < microbatches - 1
                with self.model.no_sync() if deferring else nullcontext():
                    self.model(x).sum().backward()
            where = "sync"
            if self.by_hand:
                self.model.finish_grad_sync()
        except NonFiniteGradientError as error:
            return f"{where}: {error}"
        return ""

    def gradient(self) -> Tensor | None:
        grad = self.model.full_gradients()["1.weight"]
        return None if grad is None else grad.float()


def overflow(case: Any, distributed: bool, by_hand: bool) -> tuple[str, str, str, float, float]:
    fields, dtype, value, microbatches = case
    of = Case({**fields, "use_distributed_optimizer": distributed}, dtype, by_hand)
    good = of.step(2.0, microbatches)
    first = of.gradient()
    of.model.zero_grad()
    bad = of.step(value if dist.get_rank() == 1 else 2.0, microbatches)
    of.model.zero_grad()
    again = of.step(4.0, microbatches)
    second = of.gradient()
    assert first is not None
    assert second is not None
    return good, bad, again, first.item(), second.item()


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("case", [HALF_SUM, HALF_WIRE, HALF_MAIN], ids=["sum", "wire", "main gradients"])
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed optimizer"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["auto sync", "finish_grad_sync"])
def test_infinity_that_only_travels_is_named_on_every_rank(
    run_ranks: RunRanks, case: Any, distributed: bool, by_hand: bool
) -> None:
    outcomes = run_ranks(2, overflow, case, distributed, by_hand)
    assert outcomes[0] == outcomes[1]
    good, bad, again, first, second = outcomes[0]
    microbatches = case[3]
    where = "sync" if by_hand else f"microbatch {microbatches - 1}"
    assert bad.startswith(f"{where}: {NAMED}")
    assert (good, again) == ("", "")
    assert (first, second) == (2.0 * microbatches, 4.0 * microbatches)


def leftover() -> tuple[str, bool, str]:
    """A sum of two microbatches overflows, and the backward that reduces it brings zeros."""
    of = Case({"bucket_size": 1}, torch.float16, by_hand=False)
    large = torch.full((1, 1), 6e4 if dist.get_rank() == 1 else 1.0, dtype=torch.float16)
    for _ in range(2):
        with of.model.no_sync():
            of.model(large).sum().backward()
    message = ""
    try:
        of.model(torch.zeros(1, 1, dtype=torch.float16)).sum().backward()
    except NonFiniteGradientError as error:
        message = str(error)
    grad = of.gradient()
    shown = grad is not None and bool(grad.isinf().all())
    of.model.zero_grad()
    return message, shown, of.step(1.0, 1)


def test_sums_of_earlier_backwards_are_reported_by_the_backward_that_reduces_them(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(2, leftover)
    assert outcomes[0] == outcomes[1]
    message, shown, after = outcomes[0]
    assert "1.weight (bucket 2) on rank [1] (global" in message
    assert shown  # the gradients are what they are, for those who go on
    assert after == ""


def sum_that_fits() -> tuple[str, float]:
    of = Case({}, torch.float32, by_hand=True)
    return of.step(6e4, 2), float(of.gradient() or 0.0)


def test_what_fits_its_dtype_raises_nothing(run_ranks: RunRanks) -> None:
    assert run_ranks(2, sum_that_fits) == [("", 1.2e5)] * 2
