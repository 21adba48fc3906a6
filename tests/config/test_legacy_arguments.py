"""Arguments that older callers give, and those that are not known."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallel, MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron_fsdp.automodel.config import MegatronFSDPConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import _DEFAULT_POLICY, replace_legacy_keywords
from tests.support.on_ranks import refusal

FP32, BF16 = torch.float32, torch.bfloat16
REDUCE, PRESERVE = "grad_reduce_in_fp32", "preserve_fp32_weights"
KEEP = "keep_fp8_transpose_cache_when_using_custom_fsdp"
NAMES = ("mixed_precision_policy", "report_nan_in_param_grad", "keep_fp8_transpose_cache")


def resolve(**given: Any) -> dict[str, Any]:
    """What replaces the given arguments, beside defaults."""
    today = dict(zip(NAMES, (_DEFAULT_POLICY, False, False), strict=True))
    today |= {name: given.pop(name) for name in NAMES if name in given}
    return dict(zip(NAMES, replace_legacy_keywords(*today.values(), **given), strict=True))


@pytest.mark.parametrize(
    ("legacy", "policy"),
    [
        ({REDUCE: True}, MixedPrecisionPolicy(FP32, FP32, FP32)),
        ({REDUCE: False}, MixedPrecisionPolicy(FP32, None, None)),
        ({PRESERVE: True}, MixedPrecisionPolicy(FP32, None, None)),
        ({PRESERVE: False}, MixedPrecisionPolicy(None, None, None)),
        ({REDUCE: True, PRESERVE: False}, MixedPrecisionPolicy(None, FP32, FP32)),
    ],
)
def test_precision_keywords_become_a_policy(legacy: dict[str, bool], policy: MixedPrecisionPolicy) -> None:
    with pytest.warns(FutureWarning):
        assert resolve(**legacy)["mixed_precision_policy"] == policy


def test_all_keywords_together_warn_once_at_the_caller_and_say_what_was_mapped() -> None:
    with pytest.warns(FutureWarning) as caught:
        found = resolve(check_for_nan_in_grad=True, **{REDUCE: True, PRESERVE: False, KEEP: False})
    assert (found["report_nan_in_param_grad"], found["keep_fp8_transpose_cache"]) == (True, False)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert str(caught[0].message) == (
        "grad_reduce_in_fp32=True is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
        "main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32); write that instead. "
        "preserve_fp32_weights=False is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
        "main_params_dtype=None); write that instead. "
        "check_for_nan_in_grad=True is deprecated and was taken as report_nan_in_param_grad=True; write that instead. "
        "keep_fp8_transpose_cache_when_using_custom_fsdp=False is deprecated and was taken as "
        "keep_fp8_transpose_cache=False; write that instead."
    )


def test_without_legacy_keywords_nothing_is_said_and_todays_arguments_pass() -> None:
    policy = MixedPrecisionPolicy(None, BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve() == dict(zip(NAMES, (MixedPrecisionPolicy(), False, False), strict=True))
        given = dict(zip(NAMES, (policy, True, True), strict=True))
        assert resolve(**given) == given


@pytest.mark.parametrize(
    ("name", "value", "policy"),
    [
        (REDUCE, True, MixedPrecisionPolicy(FP32, BF16)),
        (REDUCE, True, MixedPrecisionPolicy(FP32, FP32, BF16)),
        (REDUCE, False, MixedPrecisionPolicy(FP32, FP32)),
        (PRESERVE, True, MixedPrecisionPolicy(None)),
        (PRESERVE, False, MixedPrecisionPolicy()),
    ],
)
def test_a_policy_that_disagrees_is_refused(name: str, value: bool, policy: MixedPrecisionPolicy) -> None:
    assert refusal(resolve, error=ConfigurationError, mixed_precision_policy=policy, **{name: value}) == (
        f"{name}={value} is deprecated and contradicts mixed_precision_policy={policy}; leave the former out."
    )


def test_flags_that_disagree_are_refused_and_those_that_agree_pass() -> None:
    assert refusal(resolve, error=ConfigurationError, check_for_nan_in_grad=False, report_nan_in_param_grad=True) == (
        "check_for_nan_in_grad=False is deprecated and contradicts report_nan_in_param_grad=True; leave the former out."
    )
    with pytest.warns(FutureWarning):
        found = resolve(keep_fp8_transpose_cache=True, **{KEEP: True})
    assert found["keep_fp8_transpose_cache"] is True


# ---- arguments of later versions, misspelt and missing ones are refused by name before anything else happens ---------


@pytest.fixture(autouse=True)
def _without_process_group() -> None:
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("called", "wrong", "meant"),
    [
        (fully_shard, "dp_shard_dimm", "dp_shard_dim"),
        (fully_shard_model, "mixed_precision", "mixed_precision_policy"),
        (MegatronFSDP, "fsdp_unit_module", "fsdp_unit_modules"),
        (DistributedDataParallel, "find_unused_params", "find_unused_parameters"),
        (MixedPrecisionPolicy, "main_param_dtype", "main_params_dtype"),
        (MegatronFSDPConfig, "zero_strategy", "zero_dp_strategy"),
        (fully_shard_model, "qqqq", None),
    ],
)
def test_a_misspelt_argument_is_answered_with_the_nearest_or_with_help(
    called: Callable[..., Any], wrong: str, meant: str | None
) -> None:
    hint = f"see help({called.__name__})." if meant is None else f"did you mean {meant!r}?"
    told = refusal(called, nn.Linear(2, 2), error=TypeError, **{wrong: 1})
    assert told == f"{called.__name__}() has no argument {wrong!r}; {hint}"
    assert meant is None or meant in inspect.signature(called).parameters


def test_sharding_a_model_without_optimizer_is_answered_with_the_function_for_it() -> None:
    assert refusal(fully_shard, nn.Linear(2, 2), error=TypeError) == (
        "fully_shard() was called without 'optimizer'; give the optimizer after the model, or call "
        "fully_shard_model(model) to shard a model alone."
    )
