"""Distributed data parallelism by buckets: parameters cut by size, in the order in which backward reaches them."""

from megatron_fsdp.ddp.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
