"""Megatron-FSDP in native PyTorch: shard parameters, gradients and optimizer state with one call.

    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp_shard",
    fsdp_unit_modules=[Block])

An independent implementation of the interface of the `megatron_fsdp` package, not affiliated with NVIDIA.
"""

from megatron_fsdp.buffer.fp32_accumulation import reduce_scatter_with_fp32_accumulation
from megatron_fsdp.ddp import DistributedDataParallel
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.package_info import (
    __contact_emails__,
    __contact_names__,
    __description__,
    __download_url__,
    __homepage__,
    __keywords__,
    __license__,
    __package_name__,
    __repository_url__,
    __shortversion__,
    __version__,
)

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "__contact_emails__",
    "__contact_names__",
    "__description__",
    "__download_url__",
    "__homepage__",
    "__keywords__",
    "__license__",
    "__package_name__",
    "__repository_url__",
    "__shortversion__",
    "__version__",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "reduce_scatter_with_fp32_accumulation",
]
