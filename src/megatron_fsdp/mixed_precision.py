"""Mixed precision: the policy, and `is_float8tensor` of the published package."""

from megatron_fsdp.config.precision import MixedPrecisionPolicy, is_float8tensor

__all__ = ["MixedPrecisionPolicy", "is_float8tensor"]
