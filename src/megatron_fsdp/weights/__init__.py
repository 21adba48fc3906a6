"""Weights for inference engines: a source that they read while training goes on."""

from megatron_fsdp.weights.plan import ParamMeta
from megatron_fsdp.weights.source import WeightSource

__all__ = ["ParamMeta", "WeightSource"]
