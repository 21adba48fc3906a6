"""Arguments of later versions, misspelt and missing ones are refused by name before anything else happens.

There is no process group here, so whatever is refused is refused without a collective, and alike on every rank.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.automodel.config import FSDP2Config, MegatronFSDPConfig
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, NotSupportedYetError

PLACEHOLDER: Any = "stands for a process group or a mesh"

LATER_ARGUMENTS: list[dict[str, Any]] = [
    {"keep_fp8_transpose_cache": True},
    {"nccl_ub": True},
    {"disable_symmetric_registration": True},
    {"cuda_graph_mode": True},
]

LATER_CLASS_ARGUMENTS: list[dict[str, Any]] = [
    {"keep_fp8_transpose_cache": True},
    {"nccl_ub": True},
    {"disable_symmetric_registration": True},
]

LATER_CONFIG_FIELDS: list[dict[str, Any]] = [
    {"align_param_gather": True},
    {"use_distributed_optimizer": True},
    {"num_distributed_optimizer_instances": 2},
    {"num_buckets": 2},
    {"pad_buckets_for_high_nccl_busbw": True},
    {"fp8_param_gather": True},
    {"fp4_param_gather": True},
    {"keep_fp8_transpose_cache": True},
    {"disable_symmetric_registration": True},
    {"fsdp_manual_registration": True},
    {"megatron_fsdp_cuda_graph_mode": True},
]

CONFIG_FIELDS_THAT_NOTHING_READS: list[dict[str, Any]] = [
    {"grad_reduce_in_fp32": True},
    {"megatron_fsdp_version": 2},
]


@pytest.fixture(autouse=True)
def _without_process_group() -> None:
    assert not dist.is_initialized()


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(NotSupportedYetError) as caught:
        call()
    assert isinstance(caught.value, NotImplementedError)
    return str(caught.value)


def names(arguments: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in arguments.items())


@pytest.mark.parametrize("arguments", LATER_ARGUMENTS, ids=names)
def test_functions_refuse_arguments_of_later_versions_by_name(arguments: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from_model = refusal(lambda: fully_shard_model(model, **arguments))
    from_both = refusal(lambda: fully_shard(model, optimizer, **arguments))
    assert from_model == from_both
    for name, value in arguments.items():
        assert f"{name}={value!r} (default " in from_model
    assert from_model.startswith("not supported yet: ")
    assert "; this version accepts the default only, so leave " in from_model


def test_one_message_names_every_argument_at_fault() -> None:
    message = refusal(lambda: fully_shard_model(nn.Linear(2, 2), nccl_ub=True, cuda_graph_mode=True))
    assert message.startswith("not supported yet: nccl_ub=True (default False), cuda_graph_mode=True (default False); ")


def test_a_legacy_keyword_of_a_later_argument_is_refused_under_its_present_name() -> None:
    with pytest.warns(FutureWarning, match="keep_fp8_transpose_cache_when_using_custom_fsdp=True is deprecated"):
        message = refusal(
            lambda: fully_shard_model(nn.Linear(2, 2), keep_fp8_transpose_cache_when_using_custom_fsdp=True)
        )
    assert "keep_fp8_transpose_cache=True (default False)" in message


@pytest.mark.parametrize(
    "arguments", [{"outer_dp_sharding_strategy": 0}, {"outer_dp_sharding_strategy": "no_shard"}, {"nccl_ub": False}]
)
def test_defaults_may_be_written_out(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="is not initialised; start the program with torchrun"):
        fully_shard_model(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize("arguments", LATER_CLASS_ARGUMENTS, ids=names)
def test_the_class_refuses_arguments_of_later_versions_by_name(arguments: dict[str, Any]) -> None:
    index = FSDPDistributedIndex.__new__(FSDPDistributedIndex)
    message = refusal(lambda: MegatronFSDP(nn.Linear(2, 2), index, **arguments))
    for name, value in arguments.items():
        assert f"{name}={value!r} (default " in message


@pytest.mark.parametrize("fields", LATER_CONFIG_FIELDS, ids=names)
def test_the_class_refuses_config_fields_of_later_versions_by_name(fields: dict[str, Any]) -> None:
    index = FSDPDistributedIndex.__new__(FSDPDistributedIndex)
    config = DistributedDataParallelConfig(**fields)
    message = refusal(lambda: MegatronFSDP(nn.Linear(2, 2), index, config))
    for name, value in fields.items():
        assert f"{name}={value!r} (default " in message


@pytest.mark.parametrize("fields", CONFIG_FIELDS_THAT_NOTHING_READS, ids=names)
def test_the_class_refuses_or_warns_of_a_config_field_that_it_does_not_read(fields: dict[str, Any]) -> None:
    index = FSDPDistributedIndex.__new__(FSDPDistributedIndex)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            MegatronFSDP(nn.Linear(2, 2), index, DistributedDataParallelConfig(**fields))
        except MegatronFSDPError as error:
            said.append(str(error))
        except AttributeError:  # the index is hollow, so an accepted config leads here
            said += [str(warning.message) for warning in caught]
    assert any(name in text for name in fields for text in said), f"{fields} was taken in silence"


# ---- misspelt and missing arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "wrong", "meant"),
    [
        (fully_shard, "dp_shard_dimm", "dp_shard_dim"),
        (fully_shard_model, "mixed_precision", "mixed_precision_policy"),
        (fully_shard_optimizer, "preproc_state_dict_for_dcp", "preproc_state_dict_for_dcp_ckpt"),
        (MegatronFSDP, "fsdp_unit_module", "fsdp_unit_modules"),
        (FSDPDistributedIndex, "shard_dim", "dp_shard_dim"),
        (DistributedDataParallel, "find_unused_params", "find_unused_parameters"),
        (DistributedDataParallelConfig, "bucket_siz", "bucket_size"),
        (MixedPrecisionPolicy, "main_param_dtype", "main_params_dtype"),
        (FSDP2Config, "offload", "offload_policy"),
        (MegatronFSDPConfig, "zero_strategy", "zero_dp_strategy"),
    ],
)
def test_a_misspelt_argument_is_answered_with_the_nearest(called: Callable[..., Any], wrong: str, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        called(nn.Linear(2, 2), **{wrong: 1})
    assert str(caught.value) == f"{called.__name__}() has no argument {wrong!r}; did you mean {meant!r}?"
    assert meant in inspect.signature(called).parameters


def test_an_argument_that_is_like_no_other_is_answered_with_help() -> None:
    with pytest.raises(TypeError) as caught:
        fully_shard_model(nn.Linear(2, 2), qqqq=1)  # type: ignore[call-arg]
    assert str(caught.value) == "fully_shard_model() has no argument 'qqqq'; see help(fully_shard_model)."


def test_sharding_a_model_without_optimizer_is_answered_with_the_function_for_it() -> None:
    with pytest.raises(TypeError) as caught:
        fully_shard(nn.Linear(2, 2))  # type: ignore[call-arg]
    assert str(caught.value) == (
        "fully_shard() was called without 'optimizer'; give the optimizer after the model, or call "
        "fully_shard_model(model) to shard a model alone."
    )
