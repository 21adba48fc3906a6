"""Keywords of earlier versions and what became of them."""

import warnings

import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import CurrentArguments, LegacyArguments, resolve_legacy_arguments
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("legacy", "policy"),
    [
        (LegacyArguments(grad_reduce_in_fp32=True), MixedPrecisionPolicy(FP32, FP32, FP32)),
        (LegacyArguments(grad_reduce_in_fp32=False), MixedPrecisionPolicy(FP32, None, None)),
        (LegacyArguments(preserve_fp32_weights=True), MixedPrecisionPolicy(FP32, None, None)),
        (LegacyArguments(preserve_fp32_weights=False), MixedPrecisionPolicy(None, None, None)),
        (LegacyArguments(True, False), MixedPrecisionPolicy(None, FP32, FP32)),
    ],
)
def test_precision_keywords_become_a_policy(legacy: LegacyArguments, policy: MixedPrecisionPolicy) -> None:
    with pytest.warns(FutureWarning):
        assert resolve_legacy_arguments(legacy).mixed_precision_policy == policy


@pytest.mark.parametrize("value", [True, False])
def test_flags_are_renamed(value: bool) -> None:
    with pytest.warns(FutureWarning):
        resolved = resolve_legacy_arguments(LegacyArguments(None, None, value, not value))
    assert (resolved.report_nan_in_param_grad, resolved.keep_fp8_transpose_cache) == (value, not value)


def test_all_keywords_together_warn_once_at_the_caller_and_say_what_was_mapped() -> None:
    def fully_shard() -> CurrentArguments:
        return resolve_legacy_arguments(LegacyArguments(True, False, True, False))

    with pytest.warns(FutureWarning) as caught:
        resolved = fully_shard()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert str(caught[0].message) == " ".join(resolved.notices)
    assert resolved.notices == (
        (
            "grad_reduce_in_fp32=True is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
            "main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32); write that instead."
        ),
        (
            "preserve_fp32_weights=False is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
            "main_params_dtype=None); write that instead."
        ),
        "check_for_nan_in_grad=True is deprecated and was taken as report_nan_in_param_grad=True; write that instead.",
        (
            "keep_fp8_transpose_cache_when_using_custom_fsdp=False is deprecated and was taken as "
            "keep_fp8_transpose_cache=False; write that instead."
        ),
    )


def test_without_legacy_keywords_nothing_is_said_and_todays_arguments_pass() -> None:
    policy = MixedPrecisionPolicy(None, BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_legacy_arguments(LegacyArguments()) == CurrentArguments(MixedPrecisionPolicy(), False, False, ())
        assert resolve_legacy_arguments(
            LegacyArguments(),
            mixed_precision_policy=policy,
            report_nan_in_param_grad=True,
            keep_fp8_transpose_cache=True,
        ) == CurrentArguments(policy, True, True, ())


@pytest.mark.parametrize(
    ("legacy", "policy"),
    [
        (LegacyArguments(grad_reduce_in_fp32=True), MixedPrecisionPolicy(FP32, BF16)),
        (LegacyArguments(grad_reduce_in_fp32=True), MixedPrecisionPolicy(FP32, FP32, BF16)),
        (LegacyArguments(grad_reduce_in_fp32=False), MixedPrecisionPolicy(FP32, FP32)),
        (LegacyArguments(preserve_fp32_weights=True), MixedPrecisionPolicy(None)),
        (LegacyArguments(preserve_fp32_weights=False), MixedPrecisionPolicy()),
    ],
)
def test_a_policy_that_disagrees_is_refused(legacy: LegacyArguments, policy: MixedPrecisionPolicy) -> None:
    name, value = next((name, value) for name, value in vars(legacy).items() if value is not None)
    with pytest.raises(ConfigurationError) as caught:
        resolve_legacy_arguments(legacy, mixed_precision_policy=policy)
    assert str(caught.value) == (
        f"{name}={value} is deprecated and contradicts mixed_precision_policy={policy}; leave the former out."
    )


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(None, FP32), MixedPrecisionPolicy(None, FP32, FP32)])
def test_a_policy_that_agrees_is_kept(policy: MixedPrecisionPolicy) -> None:
    with pytest.warns(FutureWarning):
        resolved = resolve_legacy_arguments(LegacyArguments(True, False), mixed_precision_policy=policy)
    assert resolved.mixed_precision_policy == MixedPrecisionPolicy(None, FP32, FP32)


def test_flags_that_disagree_are_refused_and_those_that_agree_pass() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_legacy_arguments(LegacyArguments(check_for_nan_in_grad=True), report_nan_in_param_grad=False)
    assert str(caught.value) == (
        "check_for_nan_in_grad=True is deprecated and contradicts report_nan_in_param_grad=False; leave the former out."
    )
    with pytest.warns(FutureWarning):
        resolved = resolve_legacy_arguments(
            LegacyArguments(keep_fp8_transpose_cache_when_using_custom_fsdp=True), keep_fp8_transpose_cache=True
        )
    assert resolved.keep_fp8_transpose_cache is True
