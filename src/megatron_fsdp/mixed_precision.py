"""Mixed precision: the policy and what the published package has beside it."""

from megatron_fsdp.config.precision import MixedPrecisionPolicy, is_float8tensor

__all__ = ["MixedPrecisionPolicy", "is_float8tensor"]
