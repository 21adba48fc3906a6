"""Arguments of later versions, misspelt and missing ones are refused by name before anything else happens.

There is no process group here, so whatever is refused is refused without a collective, and alike on every rank.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
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
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError


@pytest.fixture(autouse=True)
def _without_process_group() -> None:
    assert not dist.is_initialized()


def test_defaults_may_be_written_out() -> None:
    with pytest.raises(ConfigurationError, match="is not initialised; start the program with torchrun"):
        fully_shard_model(nn.Linear(2, 2), outer_dp_sharding_strategy="no_shard", nccl_ub=False)


def test_the_class_refuses_what_is_not_implemented_by_name() -> None:
    index = FSDPDistributedIndex.__new__(FSDPDistributedIndex)
    config = DistributedDataParallelConfig(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True)
    with pytest.raises(
        NotSupportedYetError, match=r"reuse_grad_buf_for_mxfp8_param_ag=True \(default False\)"
    ) as caught:
        MegatronFSDP(nn.Linear(2, 2), index, config)
    assert isinstance(caught.value, NotImplementedError)


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
