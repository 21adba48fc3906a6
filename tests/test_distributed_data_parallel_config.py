"""The configuration dataclass: fields, checks, implications and the round trip through plain values."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError

DEFAULTS: dict[str, Any] = {
    "grad_reduce_in_fp32": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "align_param_gather": False,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "bucket_size": None,
    "num_buckets": None,
    "pad_buckets_for_high_nccl_busbw": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "param_name_patterns_for_fp32_local_accumulation": (),
    "average_in_collective": False,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "use_megatron_fsdp": False,
    "megatron_fsdp_version": 1,
    "use_custom_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    "gradient_reduce_div_fusion": True,
    "suggested_communication_unit_size": None,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "fsdp_all_gather_in_start_param_sync": True,
    "outer_dp_sharding_strategy": "no_shard",
    "disable_symmetric_registration": False,
    "fsdp_manual_registration": False,
    "delay_wgrad_compute": False,
    "megatron_fsdp_main_params_dtype": torch.float32,
    "megatron_fsdp_main_grads_dtype": None,
    "megatron_fsdp_grad_comm_dtype": None,
    "megatron_fsdp_use_decoupled_grad": False,
    "megatron_fsdp_cuda_graph_mode": False,
    "megatron_fsdp_enable_fine_grained_param_gather": False,
    "megatron_fsdp_max_pool_double_buffer": False,
}


def test_fields_and_defaults_are_those_of_the_published_classes() -> None:
    assert vars(DistributedDataParallelConfig()) == DEFAULTS


def test_every_field_is_documented() -> None:
    text = DistributedDataParallelConfig.__doc__ or ""
    assert [name for name in DEFAULTS if f"\n        {name}: " not in text] == []


def test_it_can_be_changed_after_construction() -> None:
    config = DistributedDataParallelConfig()
    config.bucket_size = 10
    assert config.bucket_size == 10


@pytest.mark.parametrize(("given", "name"), [(0, "no_shard"), (2, "optim_grads"), ("optim_grads_params",) * 2])
def test_strategies_are_stored_by_name(given: Any, name: str) -> None:
    assert DistributedDataParallelConfig(data_parallel_sharding_strategy=given).data_parallel_sharding_strategy == name


def test_the_outer_strategy_may_be_a_number_too() -> None:
    assert DistributedDataParallelConfig(outer_dp_sharding_strategy=1).outer_dp_sharding_strategy == "optim"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", torch.bfloat16), ("torch.bfloat16", torch.bfloat16), ("fp32", torch.float32), (torch.float16,) * 2],
)
@pytest.mark.parametrize(
    "field", ["megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"]
)
def test_dtypes_may_be_names_and_are_stored_as_dtypes(field: str, given: Any, dtype: torch.dtype) -> None:
    assert getattr(DistributedDataParallelConfig(**{field: given}), field) is dtype


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"megatron_fsdp_version": 3}, "megatron_fsdp_version=3 does not exist; give 1 or 2."),
        (
            {"reuse_grad_buf_for_mxfp8_param_ag": True},
            "reuse_grad_buf_for_mxfp8_param_ag=True needs fp8_param_gather=True; set both or neither.",
        ),
        (
            {"param_name_patterns_for_fp32_local_accumulation": ("all",), "grad_reduce_in_fp32": True},
            (
                "param_name_patterns_for_fp32_local_accumulation has no effect beside grad_reduce_in_fp32=True, which "
                "accumulates everything in float32; give only one of them."
            ),
        ),
        (
            {"param_name_patterns_for_fp32_local_accumulation": "all"},
            (
                "param_name_patterns_for_fp32_local_accumulation='all' is not a tuple of strings; "
                "write a tuple such as ('*norm*',)."
            ),
        ),
        (
            {"num_buckets": 2, "bucket_size": 10},
            "num_buckets=2 and bucket_size=10 both cut gradients into buckets; give only one of them.",
        ),
        ({"num_buckets": 0}, "num_buckets=0 is not a positive whole number; give 1 or more."),
        ({"bucket_size": -1}, "bucket_size=-1 is not a positive whole number; give 1 or more."),
        ({"bucket_size": 1.5}, "bucket_size=1.5 is not a positive whole number; give 1 or more."),
        ({"bucket_size": True}, "bucket_size=True is not a positive whole number; give 1 or more."),
        (
            {"suggested_communication_unit_size": 0},
            "suggested_communication_unit_size=0 is not a positive whole number; give 1 or more.",
        ),
        (
            {"num_distributed_optimizer_instances": None},
            "num_distributed_optimizer_instances=None is not a positive whole number; give 1 or more.",
        ),
        (
            {"data_parallel_sharding_strategy": "zero3"},
            (
                "data_parallel_sharding_strategy='zero3' is not a sharding strategy; give one of "
                '0 or "no_shard", 1 or "optim", 2 or "optim_grads", 3 or "optim_grads_params".'
            ),
        ),
        (
            {"outer_dp_sharding_strategy": 2},
            (
                "outer_dp_sharding_strategy='optim_grads' is not possible on the outer axis; "
                'give 0 or "no_shard", or 1 or "optim".'
            ),
        ),
        (
            {"megatron_fsdp_grad_comm_dtype": "bf61"},
            (
                "megatron_fsdp_grad_comm_dtype='bf61' is not a dtype name; give one of fp16, half, float16, bf16, "
                "bfloat16, fp32, float, float32, fp64, double, float64."
            ),
        ),
        (
            {"megatron_fsdp_main_grads_dtype": 32},
            (
                "megatron_fsdp_main_grads_dtype=32 is not a torch.dtype; give one of torch.float16, torch.bfloat16, "
                "torch.float32, torch.float64, or None to follow."
            ),
        ),
    ],
)
def test_what_is_not_possible_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DistributedDataParallelConfig(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize("field", ["nccl_ub", "megatron_fsdp_max_pool_double_buffer"])
def test_what_rests_on_double_buffers_turns_them_on(field: str) -> None:
    assert DistributedDataParallelConfig(**{field: True}).fsdp_double_buffer is True


def test_the_former_name_of_the_engine_flag_is_mapped_with_a_warning_at_the_caller() -> None:
    with pytest.warns(DeprecationWarning, match="use_custom_fsdp") as caught:
        config = DistributedDataParallelConfig(use_custom_fsdp=True)
    assert (config.use_megatron_fsdp, config.use_custom_fsdp) == (True, False)
    assert [str(warning.message) for warning in caught] == [
        "use_custom_fsdp is deprecated and was taken as use_megatron_fsdp=True; write that instead."
    ]
    assert caught[0].filename == __file__


def test_plain_values_survive_json_and_come_back_equal() -> None:
    config = DistributedDataParallelConfig(
        bucket_size=7,
        data_parallel_sharding_strategy="optim",
        param_name_patterns_for_fp32_local_accumulation=("*norm*", "*.bias"),
        megatron_fsdp_main_params_dtype=None,
        megatron_fsdp_grad_comm_dtype=torch.bfloat16,
    )
    plain = config.to_dict()
    assert plain["megatron_fsdp_grad_comm_dtype"] == "bfloat16"
    assert plain["megatron_fsdp_main_params_dtype"] is None
    assert plain["param_name_patterns_for_fp32_local_accumulation"] == ["*norm*", "*.bias"]
    assert DistributedDataParallelConfig.from_dict(json.loads(json.dumps(plain))) == config


def test_missing_keys_take_defaults() -> None:
    assert DistributedDataParallelConfig.from_dict({}) == DistributedDataParallelConfig()


def test_an_unknown_key_is_refused_with_the_nearest_field() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DistributedDataParallelConfig.from_dict({"overlap_grad_reduc": True})
    assert str(caught.value) == (
        "'overlap_grad_reduc' is not a field of DistributedDataParallelConfig; did you mean 'overlap_grad_reduce'?"
    )


def test_an_unknown_key_like_no_field_is_refused_with_all_fields() -> None:
    names = ", ".join(field.name for field in dataclasses.fields(DistributedDataParallelConfig))
    with pytest.raises(ConfigurationError) as caught:
        DistributedDataParallelConfig.from_dict({"zzz": 1})
    assert str(caught.value) == f"'zzz' is not a field of DistributedDataParallelConfig; the fields are {names}."
