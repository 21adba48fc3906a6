"""The configuration of `DistributedDataParallel`."""

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig

__all__ = ["DistributedDataParallelConfig"]
