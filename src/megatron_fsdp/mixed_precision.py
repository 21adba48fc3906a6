"""Mixed precision: the policy, and names of the published package about tensors of TransformerEngine."""

import torch

from megatron_fsdp.config.precision import WEIGHT_FORMAT_NAMES, MixedPrecisionPolicy, is_float8tensor, is_te_tensor
from megatron_fsdp.errors import NotSupportedYetError

__all__ = ["MixedPrecisionPolicy", "is_blockwise_float8tensor", "is_float8tensor", "is_te_min_version"]

_FUNCTIONS = (
    "fp8_need_transpose_data",
    "fp8_need_transpose_data_for_meta_device_init",
    "fp8_discard_transpose_cache",
    "fp8_create_transpose_cache",
    "fp8_get_raw_data",
    "fp8_set_raw_data",
    "fp8_quantize",
    "fp8_dequantize",
    "get_quantized_model_init_context_cls",
)


def is_te_min_version(vers: str, check_equality: bool = True) -> bool:  # noqa: ARG001
    """Return False: this package does not use TransformerEngine."""
    return False


def is_blockwise_float8tensor(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is one of TransformerEngine's in float8 with a scale for each block."""
    return is_te_tensor(tensor, "Float8BlockwiseQTensor")


def __getattr__(name: str) -> object:
    """Return False for `HAVE_TE...`, and a function that raises for those that handle TransformerEngine's tensors."""
    if name.startswith("HAVE_TE"):
        return False
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*_: object, **__: object) -> None:
        raise NotSupportedYetError(
            f"{name} handles tensors of TransformerEngine, which this version does not; for weights in few bits give "
            f"MixedPrecisionPolicy a weight_format: {', '.join(WEIGHT_FORMAT_NAMES)}"
        )

    refuse.__name__ = name
    return refuse
