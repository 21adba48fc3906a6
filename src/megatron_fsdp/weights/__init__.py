"""Weights for inference engines: a source that they read while training goes on."""

from megatron_fsdp.weights.delta import Patch, Shard
from megatron_fsdp.weights.plan import ParamMeta
from megatron_fsdp.weights.source import WeightSource
from megatron_fsdp.weights.transport import for_vllm, per_tensor_params, receive, send, stateless_group

__all__ = [
    "ParamMeta",
    "Patch",
    "Shard",
    "WeightSource",
    "for_vllm",
    "per_tensor_params",
    "receive",
    "send",
    "stateless_group",
]
