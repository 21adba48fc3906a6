"""The fields that choose dtypes, sums and factors: each has the effect that it promises, against float64."""

from collections import OrderedDict
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from tests.conftest import RunRanks
from tests.support.case import DdpSetting, Scenario, Tolerance, assert_parity, ddp, reference, run_sharded
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.zoo import ModelCase, make_vector_batch, vector_loss

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
    wrapped = DistributedDataParallel(DistributedDataParallelConfig(**fields), deepcopy(plain))
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
def test_patterns_accumulate_matching_gradients_in_float32(run_ranks: RunRanks, way: Fields) -> None:
    """In bfloat16 the error grows with the number of summands; in float32 one rounding is left, on the wire."""
    own = {"megatron_fsdp_main_params_dtype": None}
    for found, dtypes in run_ranks(2, errors, {**way, **own}, MICROBATCHES):
        assert min(found.values()) > 1.5 * BF16
        assert set(dtypes.values()) == {torch.bfloat16}
    for found, _ in run_ranks(2, errors, {**way, **own, PATTERNS: ("first.*",)}, MICROBATCHES):
        assert found["first.weight"] < BF16 < 1.5 * BF16 < found["second.weight"]
    for found, _ in run_ranks(2, errors, {**way, **own, PATTERNS: ("all",)}, MICROBATCHES):
        assert max(found.values()) < BF16
    for found, dtypes in run_ranks(2, errors, {**way, "grad_reduce_in_fp32": True}, MICROBATCHES):
        assert max(found.values()) < 1e-6
        assert set(dtypes.values()) == {torch.float32}


def sent_bytes(fields: Fields) -> tuple[int, int]:
    """Bytes of one steady step: gathered, reduced."""
    wrapped = DistributedDataParallel(DistributedDataParallelConfig(**fields), pair())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        before = wrapped.traffic()
        wrapped(torch.ones(1, FEATURES, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = wrapped.traffic().since(before)
    return sent.gather_bytes, sent.reduce_bytes


def test_dtypes_decide_what_is_sent(run_ranks: RunRanks) -> None:
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
    for fields, sent in expected:
        assert run_ranks(2, sent_bytes, fields) == [sent] * 2, fields


# ---- main weights ----------------------------------------------------------------------------------------------------


def tiny_updates(fields: Fields) -> float:
    """How far a weight of 1 has come after 64 updates of 2**-10."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    wrapped = DistributedDataParallel(DistributedDataParallelConfig(**fields), model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=2.0**-10)
    for _ in range(64):
        wrapped(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(wrapped(torch.ones(1, 4, dtype=torch.bfloat16))[0, 0])


@pytest.mark.full(short=["way1"])
@pytest.mark.parametrize("way", WAYS)
def test_main_weights_in_float32_are_the_default_and_keep_small_updates(run_ranks: RunRanks, way: Fields) -> None:
    assert run_ranks(2, tiny_updates, way) == [4 - 4 * 64 / 1024] * 2
    assert run_ranks(2, tiny_updates, {**way, "megatron_fsdp_main_params_dtype": None}) == [4.0] * 2


# ---- factors ---------------------------------------------------------------------------------------------------------


def huge(fields: Fields) -> list[bool]:
    """Whether the mean of gradients whose sum leaves the range of bfloat16 (3.4e38) is finite."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    wrapped = DistributedDataParallel(DistributedDataParallelConfig(**fields), model)
    wrapped(torch.full((1, 2), 3e38, dtype=torch.bfloat16)).sum().backward()
    return [bool(grad.isfinite().all()) for grad in wrapped.full_gradients().values() if grad is not None]


@pytest.mark.parametrize("way", WAYS)
def test_division_before_the_sum_keeps_it_in_range(run_ranks: RunRanks, way: Fields) -> None:
    own = {**way, "megatron_fsdp_main_params_dtype": None}
    assert run_ranks(2, huge, own) == [[False]] * 2
    assert run_ranks(2, huge, {**own, "gradient_reduce_div_fusion": False}) == [[True]] * 2


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


# ---- training --------------------------------------------------------------------------------------------------------


def build(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)).to(dtype)


def bf16_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch.inputs.bfloat16()).float(), batch.targets)


def rounded(run: Any) -> None:
    """Only losses and weights are compared: gradients have other dtypes than on one process."""
    for step in range(3):
        run.loss(step).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    values = run.sharded.full_parameters() if run.sharded is not None else dict(run.model.named_parameters())
    run.note("weights", {name: value.float() for name, value in values.items()})


MIXED: tuple[DdpSetting, ...] = (
    ddp(),
    ddp(grad_reduce_in_fp32=True, overlap_grad_reduce=True),
    ddp(use_distributed_optimizer=True, param_name_patterns_for_fp32_local_accumulation=("0.*",)),
    ddp(
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        megatron_fsdp_main_grads_dtype="fp32",
        megatron_fsdp_grad_comm_dtype="bf16",
        reduce_scatter_with_fp32_accumulation=True,
        bucket_size=20,
    ),
    ddp(use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads", grad_reduce_in_fp32=True),
)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_bfloat16_model_trains_as_on_one_process_up_to_rounding(run_ranks: RunRanks, num_ranks: int) -> None:
    scenario = Scenario(rounded, ModelCase(partial(build, torch.bfloat16), make_vector_batch, bf16_loss, (nn.Linear,)))
    plain = Scenario(rounded, ModelCase(partial(build, torch.float32), make_vector_batch, vector_loss, (nn.Linear,)))
    by_rank = run_ranks(num_ranks, run_sharded, [(scenario, setting) for setting in MIXED])
    for outcomes in zip(*by_rank, strict=True):
        assert_parity(outcomes, reference(plain), Tolerance(rtol=2**-6, atol=2**-7))
