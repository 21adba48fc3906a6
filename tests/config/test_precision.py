"""The precision policy: what it accepts and what following means."""

import pytest
import torch

from megatron_fsdp.config.precision import MixedPrecisionPolicy, ResolvedPrecision, dtype_from_name, resolve_precision
from megatron_fsdp.errors import ConfigurationError

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FIELDS = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")


FOUR = "; give one of torch.float16, torch.bfloat16, torch.float32, torch.float64, or None to follow."


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["bf16", 32, float, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_objects_and_dtypes_that_cannot_accumulate_are_refused(field: str, value: object) -> None:
    is_dtype = isinstance(value, torch.dtype)
    with pytest.raises(ConfigurationError if is_dtype else TypeError) as caught:
        MixedPrecisionPolicy(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{field}={value!r} {'cannot be used' if is_dtype else 'is not a torch.dtype'}{FOUR}"


@pytest.mark.parametrize(
    ("policy", "param_dtype", "expected"),
    [
        (MixedPrecisionPolicy(), BF16, ResolvedPrecision(BF16, FP32, BF16, BF16, has_main_copy=True)),
        (MixedPrecisionPolicy(), FP32, ResolvedPrecision(FP32, FP32, FP32, FP32, has_main_copy=False)),
        (MixedPrecisionPolicy(), FP64, ResolvedPrecision(FP64, FP32, FP64, FP64, has_main_copy=True)),
        (MixedPrecisionPolicy(None), BF16, ResolvedPrecision(BF16, BF16, BF16, BF16, has_main_copy=False)),
        (MixedPrecisionPolicy(FP32, FP32), BF16, ResolvedPrecision(BF16, FP32, FP32, FP32, has_main_copy=True)),
        (MixedPrecisionPolicy(FP32, FP32, BF16), BF16, ResolvedPrecision(BF16, FP32, FP32, BF16, has_main_copy=True)),
        (MixedPrecisionPolicy(None, None, FP16), FP32, ResolvedPrecision(FP32, FP32, FP32, FP16, has_main_copy=False)),
        (MixedPrecisionPolicy(FP64, FP64), FP32, ResolvedPrecision(FP32, FP64, FP64, FP64, has_main_copy=True)),
    ],
)
def test_none_follows(policy: MixedPrecisionPolicy, param_dtype: torch.dtype, expected: ResolvedPrecision) -> None:
    assert resolve_precision(policy, param_dtype) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_parameters_that_are_not_real_numbers_keep_their_dtype_everywhere(dtype: torch.dtype) -> None:
    resolved = resolve_precision(MixedPrecisionPolicy(FP32, FP32, BF16), dtype)
    assert resolved == ResolvedPrecision(dtype, dtype, dtype, dtype, has_main_copy=False)


def test_float8_parameters_need_main_weights_and_their_gradients_are_bfloat16() -> None:
    float8 = torch.float8_e4m3fn
    assert resolve_precision(MixedPrecisionPolicy(), float8) == ResolvedPrecision(
        float8, FP32, BF16, BF16, has_main_copy=True
    )
    with pytest.raises(ConfigurationError) as caught:
        resolve_precision(MixedPrecisionPolicy(main_params_dtype=None), torch.float8_e5m2)
    assert str(caught.value) == (
        "main_params_dtype=None leaves torch.float8_e5m2 parameters without weights that an optimizer can update; "
        "set main_params_dtype=torch.float32."
    )


def test_dtype_names_are_understood_or_refused() -> None:
    names = {"bf16": BF16, "torch.bfloat16": BF16, "fp16": FP16, "half": FP16, "float": FP32, "torch.float64": FP64}
    assert {name: dtype_from_name(name) for name in names} == names
    with pytest.raises(ConfigurationError, match=r"^main='bf61' is not a dtype name; give one of fp16, half, float16,"):
        dtype_from_name("bf61", "main")
