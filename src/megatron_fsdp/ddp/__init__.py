"""Distributed data parallelism by buckets: parameters grouped by size, in backward order."""

from megatron_fsdp.ddp.distributed_data_parallel import DistributedDataParallel
from megatron_fsdp.ddp.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedDataParallel", "DistributedOptimizer"]
