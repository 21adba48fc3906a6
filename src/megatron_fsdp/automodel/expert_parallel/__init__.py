"""Expert parallelism for mixture-of-experts models of transformers: each rank holds some experts of every layer."""

from megatron_fsdp.automodel.expert_parallel.parallelize import parallelize_experts
from megatron_fsdp.automodel.expert_parallel.sharding import shard_experts

__all__ = ["parallelize_experts", "shard_experts"]
