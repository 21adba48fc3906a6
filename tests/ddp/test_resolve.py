"""From the configuration to what is done: every refusal, what is derived, and what is said about it; pure."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given

from megatron_fsdp import DistributedDataParallelConfig, MixedPrecisionPolicy
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.ddp.buckets import GatherMode
from megatron_fsdp.ddp.resolve import ResolvedDDP, resolve_ddp
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError
from tests.config.test_ddp_config import valid_configs

Fields = dict[str, Any]

SHARDS: Fields = {"use_distributed_optimizer": True}
UNITS: Fields = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


def resolve(num_ranks: int = 4, num_parameters: int = 1_000, disable_bucketing: bool = False, **f: Any) -> ResolvedDDP:
    return resolve_ddp(DistributedDataParallelConfig(**f), num_ranks, num_parameters, disable_bucketing)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_gathers_in_few_bits_are_weight_formats_of_sharded_weights() -> None:
    assert resolve(**UNITS, fp8_param_gather=True).policy.weight_format == "fp8"
    kept = resolve(**UNITS, fp8_param_gather=True, keep_fp8_transpose_cache=True)
    assert kept.policy.weight_format == "fp8_compute"
    assert any(each.startswith("linears multiply float8 weights") for each in kept.notes)
    assert resolve(**UNITS, fp4_param_gather=True).policy.weight_format == "nvfp4"
    reuse = {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
    assert resolve(**UNITS, **reuse).policy.weight_format == "mxfp8"
    with pytest.raises(ConfigurationError, match="name two formats of weights"):
        resolve(**UNITS, **reuse, keep_fp8_transpose_cache=True)
    words = ("*.head.*=none", "*.experts.*=nvfp4", "mxfp8")
    named = {"*.head.*": None, "*.experts.*": "nvfp4", "*": "mxfp8"}
    assert resolve(**UNITS, megatron_fsdp_weight_format=words).policy.weight_format == named
    with pytest.raises(ConfigurationError, match="'fp9' does not exist; give one of fp8, "):
        resolve(**UNITS, megatron_fsdp_weight_format=("*=fp9",))
    with pytest.raises(ConfigurationError, match="fp4_param_gather=True has no effect without sharded weights"):
        resolve(**SHARDS, fp4_param_gather=True)


def sets(text: str) -> Fields:
    """Fields out of `name` (True) and `name=value`, separated by blanks."""
    pairs = [word.partition("=") for word in text.split()]
    return {name: eval(value) if value else True for name, _, value in pairs}


REFUSED = """
# without effect on buckets
data_parallel_sharding_strategy='optim' :: has no effect without use_megatron_fsdp=True; set use_distributed_optimizer
data_parallel_sharding_strategy='optim_grads_params' :: \
has no effect without use_megatron_fsdp=True; set use_megatron_fsdp=True or leave it out
outer_dp_sharding_strategy='optim' :: has no effect without use_megatron_fsdp=True
suggested_communication_unit_size=5 :: has no effect without
fsdp_double_buffer :: has no effect without use_megatron_fsdp
fsdp_db_use_persist_buf_on_alloc_fail :: has no effect
fsdp_all_gather_in_start_param_sync=False :: has no effect
megatron_fsdp_enable_fine_grained_param_gather :: has no effect
fsdp_manual_registration nccl_ub :: has no effect without
megatron_fsdp_cuda_graph_mode :: has no effect without
megatron_fsdp_version=2 :: has no effect without use_megatron_fsdp=True
# without effect on units
num_buckets=2 UNITS :: has no effect with use_megatron_fsdp=True; leave it out
pad_buckets_for_high_nccl_busbw UNITS :: has no effect with
align_param_gather overlap_param_gather UNITS :: has no effect with use_megatron_fsdp=True
# contradictions
use_distributed_optimizer use_megatron_fsdp :: contradicts data_parallel_sharding_strategy="no_shard"
overlap_param_gather :: has no effect without use_distributed_optimizer=True
overlap_param_gather use_megatron_fsdp :: has no effect without a sharding strategy
reduce_scatter_with_fp32_accumulation :: has no effect without .* gradients are all-reduced
num_distributed_optimizer_instances=2 :: has no effect without
align_param_gather SHARDS :: has no effect without overlap_param_gather=True
num_distributed_optimizer_instances=3 SHARDS :: does not divide the 4 data-parallel ranks; give one of 1, 2, 4
outer_dp_sharding_strategy='optim' UNITS :: has no effect with num_distributed_optimizer_instances=1
grad_reduce_in_fp32 megatron_fsdp_main_grads_dtype='bf16' :: contradicts megatron_fsdp_main_grads_dtype=torch.bfloat16
grad_reduce_in_fp32 megatron_fsdp_grad_comm_dtype='bf16' :: contradicts megatron_fsdp_grad_comm_dtype=torch.bfloat16
"""
"""Fields and what their refusal says behind the first one and its value."""


@pytest.mark.parametrize("line", [line for line in REFUSED.splitlines() if "::" in line])
def test_what_cannot_take_effect_is_refused_in_words(line: str) -> None:
    given, _, words = line.partition(" :: ")
    fields = sets(given)
    name, value = next(iter(fields.items()))
    fields |= (UNITS if fields.pop("UNITS", False) else {}) | (SHARDS if fields.pop("SHARDS", False) else {})
    with pytest.raises(ConfigurationError, match=f"{name}={value!r} {words}"):
        resolve(**fields)


# ---- what is derived -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "num_ranks", "numel", "note"),
    [
        ({"bucket_size": 123}, 4, 123, None),
        ({}, 4, None, "one bucket for each kind of parameter: overlap_grad_reduce is off and no bucket_size is given"),
        ({"overlap_grad_reduce": True}, 1, 40_000_000, "40,000,000 parameters: the default for 1 ranks"),
        ({"overlap_grad_reduce": True}, 40, 40_000_000, "the default for 40 ranks"),
        ({"overlap_grad_reduce": True}, 41, 41_000_000, "41,000,000 parameters: the default for 41 ranks"),
        ({"num_buckets": 3}, 4, 334, "buckets close at 334 parameters: 1,000 in num_buckets=3"),
        ({"num_buckets": 1}, 4, 1_000, "1,000 in num_buckets=1"),
        ({"num_buckets": 5_000}, 4, 1, "buckets close at 1 parameters"),
        ({**UNITS, "bucket_size": 9}, 4, 9, None),
        (UNITS, 4, None, None),
    ],
)
def test_the_size_of_buckets(fields: Fields, num_ranks: int, numel: int | None, note: str | None) -> None:
    found = resolve(num_ranks, **fields)
    assert found.bucket_numel == numel
    said = [line for line in found.notes if "bucket" in line]
    assert (said == []) if note is None else (len(said) == 1 and note in said[0])


@pytest.mark.parametrize(
    ("fields", "strategy", "outer"),
    [
        ({}, 0, 0),
        ({**SHARDS, "num_distributed_optimizer_instances": 2}, 1, 0),
        ({"use_megatron_fsdp": True}, 0, 0),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": 2}, 2, 0),
        ({**UNITS, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}, 3, 1),
    ],
)
def test_the_strategy(fields: Fields, strategy: int, outer: int) -> None:
    found = resolve(**fields)
    assert (found.strategy, found.outer_strategy) == (strategy, outer)
    assert found.engine_config.data_parallel_sharding_strategy == ShardingStrategy(strategy).name


def test_when_weights_are_gathered() -> None:
    assert resolve(**SHARDS).gather_mode is GatherMode.AT_ONCE
    overlapped = {**SHARDS, "overlap_param_gather": True}
    assert resolve(**overlapped).gather_mode is GatherMode.IN_TURN
    assert resolve(**overlapped, align_param_gather=True).gather_mode is GatherMode.TOGETHER
    assert resolve().numel_multiple == 1
    assert resolve(pad_buckets_for_high_nccl_busbw=True).numel_multiple == 2**16


FP32 = torch.float32


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("", (FP32, None, None)),
        ("megatron_fsdp_main_params_dtype=None", (None, None, None)),
        ("grad_reduce_in_fp32", (FP32, FP32, FP32)),
        ("grad_reduce_in_fp32 megatron_fsdp_grad_comm_dtype='fp32'", (FP32, FP32, FP32)),
        ("megatron_fsdp_main_grads_dtype='fp32' megatron_fsdp_grad_comm_dtype='bf16'", (FP32, FP32, torch.bfloat16)),
    ],
)
def test_dtypes(given: str, policy: tuple[torch.dtype | None, ...]) -> None:
    found = resolve(**sets(given))
    assert found.policy == MixedPrecisionPolicy(*policy)
    says = any("grad_reduce_in_fp32" in line for line in found.notes)
    assert says is ("grad_reduce_in_fp32" in given)


def test_notices_of_what_is_implied() -> None:
    found = resolve(**UNITS, use_distributed_optimizer=True)
    assert found.notes == (
        "use_distributed_optimizer: implied by data_parallel_sharding_strategy='optim_grads_params'",
        "overlap_grad_reduce is always on with optim_grads_params",
    )
    assert resolve(**UNITS, overlap_grad_reduce=True).notes == ()


@given(valid_configs())
def test_any_configuration_is_resolved_or_refused_and_never_written_to(config: DistributedDataParallelConfig) -> None:
    before = dataclasses.asdict(config)
    try:
        found = resolve_ddp(config, 4, 10_000)
    except (ConfigurationError, NotSupportedYetError) as error:
        assert len(str(error)) > 30  # noqa: PT017
    else:
        assert found.engine_config is not config
        assert found.bucket_numel is None or found.bucket_numel >= 1
    assert dataclasses.asdict(config) == before
