"""Sharding module by module, in place: the interface of `megatron_fsdp.experimental` of the published package."""

from megatron_fsdp.experimental.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.experimental.dbuffer import DBuffer
from megatron_fsdp.experimental.module import fully_shard, fully_shard_context, fully_shard_optimizer, microbatch
from megatron_fsdp.experimental.placement import Placements

__all__ = [
    "DBuffer",
    "Placements",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "load_checkpoint",
    "microbatch",
    "save_checkpoint",
]
