"""Context parallelism: the ranks of one mesh dimension share the tokens of every sequence."""

from megatron_fsdp.automodel.context_parallel.batch import shard_batch, unshard_sequence
from megatron_fsdp.automodel.context_parallel.enable import check_call, enable_context_parallel

__all__ = ["check_call", "enable_context_parallel", "shard_batch", "unshard_sequence"]
