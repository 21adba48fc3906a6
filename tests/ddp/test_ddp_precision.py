"""The fields that choose dtypes, sums and factors: each has the effect that it promises, against float64."""

from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from tests.support.on_ranks import fixed_seed, on_ranks

Fields = dict[str, Any]
MICROBATCHES = 48
FEATURES = 8


def pair() -> nn.Module:
    """Two bfloat16 layers."""
    first, second = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
    return nn.Sequential(OrderedDict(first=first, between=nn.Tanh(), second=second)).bfloat16()


def wrap(fields: Fields, model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(DistributedDataParallelConfig(**fields), model)


def errors(fields: Fields, microbatches: int) -> tuple[dict[str, float], dict[str, torch.dtype]]:
    """Relative error of gradients summed over microbatches and ranks, against float64; and the dtypes they have.

    Every rank computes the same gradients in the same bfloat16 operations alone, so that only their sums differ.
    """
    with fixed_seed(0):
        plain = pair()
    wrapped = wrap(fields, deepcopy(plain))
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


def train(wrapped: DistributedDataParallel, lr: float, steps: int) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    for _ in range(steps):
        wrapped(torch.ones(1, FEATURES, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_dtypes_decide_what_is_sent() -> None:
    """Bytes gathered and reduced in one steady step."""
    numel = 2 * FEATURES * FEATURES
    shards = WAYS[1]
    expected: list[tuple[Fields, tuple[int, int]]] = [
        (shards, (numel, numel)),  # 2 bytes, of which the other rank gets half
        ({**shards, "grad_reduce_in_fp32": True}, (numel, 2 * numel)),
        ({**shards, "megatron_fsdp_main_grads_dtype": "fp32"}, (numel, 2 * numel)),
        ({**shards, "megatron_fsdp_main_grads_dtype": "fp32", "megatron_fsdp_grad_comm_dtype": "bf16"}, (numel, numel)),
        ({**shards, PATTERNS: ("all",)}, (numel, numel)),
        ({"grad_reduce_in_fp32": True}, (0, 4 * numel)),
        ({}, (0, 2 * numel)),
    ]
    for fields, wanted in expected:
        wrapped = wrap(fields, pair())
        train(wrapped, 0.1, 1)
        before = wrapped.traffic()
        train(wrapped, 0.1, 1)
        sent = wrapped.traffic().since(before)
        assert (sent.gather_bytes, sent.reduce_bytes) == wanted, fields


# ---- main weights ----------------------------------------------------------------------------------------------------


@pytest.mark.full(short=["way1"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_main_weights_in_float32_are_the_default_and_keep_small_updates(way: Fields) -> None:
    """Weights of 1 after 64 updates of 2**-10."""
    for fields, expected in ((way, 1 - 64 / 1024), ({**way, "megatron_fsdp_main_params_dtype": None}, 1.0)):
        model = nn.Linear(FEATURES, FEATURES, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        wrapped = wrap(fields, model)
        train(wrapped, 2.0**-10, 64)
        with torch.no_grad():
            assert wrapped(torch.ones(1, FEATURES, dtype=torch.bfloat16))[0, 0] == FEATURES * expected


# ---- factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_division_before_the_sum_keeps_it_in_range(way: Fields) -> None:
    """The mean of gradients whose sum leaves the range of bfloat16 (3.4e38)."""
    for division, is_finite in (({}, False), ({"gradient_reduce_div_fusion": False}, True)):
        model = nn.Linear(2, 2, bias=False).bfloat16()
        wrapped = wrap({**way, **division, "megatron_fsdp_main_params_dtype": None}, model)
        wrapped(torch.full((1, 2), 3e38, dtype=torch.bfloat16)).sum().backward()
        (grad,) = wrapped.full_gradients().values()
        assert grad is not None
        assert bool(grad.isfinite().all()) is is_finite


@on_ranks(4)
def test_low_precision_values_are_added_in_float32() -> None:
    """1 + 3 * 2**-8 = 1.01171875, whose neighbours in bfloat16 are 1.0078125 and 1.015625."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        megatron_fsdp_main_grads_dtype="fp32",
        megatron_fsdp_grad_comm_dtype="bf16",
        reduce_scatter_with_fp32_accumulation=True,
    )
    model = nn.Linear(1, 4, bias=False).bfloat16()
    wrapped = DistributedDataParallel(config, model, calculate_per_token_loss=True)
    value = 1.0 if torch.distributed.get_rank() == 0 else 2.0**-8
    wrapped(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    (grad,) = wrapped.full_gradients().values()
    assert grad is not None
    assert [float(found) for found in grad.flatten()] == [1 + 3 * 2.0**-8] * 4
