"""The fields that choose dtypes, sums and factors: each has the effect that it promises, against float64."""

from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.doors import in_buckets
from tests.support.on_ranks import fixed_seed, on_ranks

Fields = dict[str, Any]
MICROBATCHES = 48
FEATURES = 8


def pair() -> nn.Module:
    """Two bfloat16 layers."""
    first, second = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
    return nn.Sequential(OrderedDict(first=first, between=nn.Tanh(), second=second)).bfloat16()


def errors(fields: Fields, microbatches: int) -> tuple[dict[str, float], dict[str, torch.dtype]]:
    """Relative error of gradients summed over microbatches and ranks, against float64; and the dtypes they have.

    Every rank computes the same gradients in the same bfloat16 operations alone, so that only their sums differ.
    """
    with fixed_seed(0):
        plain = pair()
    wrapped = in_buckets(deepcopy(plain), fields)
    data = torch.Generator().manual_seed(1)
    exact = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in plain.named_parameters()}
    for microbatch in range(microbatches):
        x = torch.randn(3, FEATURES, generator=data).bfloat16()
        plain.zero_grad()
        plain(x).square().sum().backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            exact[name] += param.grad
        with wrapped.no_sync() if microbatch < microbatches - 1 else nullcontext():
            wrapped(x).square().sum().backward()
    found, dtypes = {}, {}
    for name, grad in wrapped.full_gradients().items():
        assert grad is not None
        found[name] = ((grad.double() - exact[name]).norm() / exact[name].norm()).item()
    for group in wrapped.parameter_groups():
        if group.gradients is not None:
            dtypes.update(dict.fromkeys(group.names, group.gradients.main.local.dtype))
    return found, dtypes


WAYS: tuple[Fields, ...] = ({}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True})
PATTERNS = "param_name_patterns_for_fp32_local_accumulation"
BF16 = 2.0**-8
"""Relative rounding of one bfloat16 operation is half of this."""


@pytest.mark.full(short=["way1"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_patterns_accumulate_matching_gradients_in_float32(way: Fields) -> None:
    """In bfloat16 the error grows with the number of summands; in float32 one rounding is left, on the wire."""
    own = {**way, "megatron_fsdp_main_params_dtype": None}
    found, dtypes = errors(own, MICROBATCHES)
    assert min(found.values()) > 1.5 * BF16
    assert set(dtypes.values()) == {torch.bfloat16}
    found, _ = errors({**own, PATTERNS: ("first.*",)}, MICROBATCHES)
    assert found["first.weight"] < BF16 < 1.5 * BF16 < found["second.weight"]
    found, _ = errors({**own, PATTERNS: ("all",)}, MICROBATCHES)
    assert max(found.values()) < BF16
    found, dtypes = errors({**way, "grad_reduce_in_fp32": True}, MICROBATCHES)
    assert max(found.values()) < 1e-6
    assert set(dtypes.values()) == {torch.float32}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_division_before_the_sum_keeps_it_in_range(way: Fields) -> None:
    """The mean of gradients whose sum leaves the range of bfloat16 (3.4e38); whole ones are divided first anyway."""
    is_whole = not way.get("use_distributed_optimizer")
    for division, is_finite in (({}, is_whole), ({"gradient_reduce_div_fusion": False}, True)):
        model = nn.Linear(2, 2, bias=False).bfloat16()
        wrapped = in_buckets(model, {**way, **division, "megatron_fsdp_main_params_dtype": None})
        wrapped(torch.full((1, 2), 3e38, dtype=torch.bfloat16)).sum().backward()
        (grad,) = wrapped.full_gradients().values()
        assert grad is not None
        assert bool(grad.isfinite().all()) is is_finite
