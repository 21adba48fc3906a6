"""Keywords of earlier versions and what became of them."""

import warnings
from typing import Any

import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import _DEFAULT_POLICY, replace_legacy_keywords
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy

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
    with pytest.raises(ConfigurationError) as caught:
        resolve(mixed_precision_policy=policy, **{name: value})
    assert str(caught.value) == (
        f"{name}={value} is deprecated and contradicts mixed_precision_policy={policy}; leave the former out."
    )


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(None, FP32), MixedPrecisionPolicy(None, FP32, FP32)])
def test_a_policy_that_agrees_is_kept(policy: MixedPrecisionPolicy) -> None:
    with pytest.warns(FutureWarning):
        found = resolve(mixed_precision_policy=policy, **{REDUCE: True, PRESERVE: False})
    assert found["mixed_precision_policy"] == MixedPrecisionPolicy(None, FP32, FP32)


def test_flags_that_disagree_are_refused_and_those_that_agree_pass() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(check_for_nan_in_grad=False, report_nan_in_param_grad=True)
    assert str(caught.value) == (
        "check_for_nan_in_grad=False is deprecated and contradicts report_nan_in_param_grad=True; leave the former out."
    )
    with pytest.warns(FutureWarning):
        found = resolve(keep_fp8_transpose_cache=True, **{KEEP: True})
    assert found["keep_fp8_transpose_cache"] is True
