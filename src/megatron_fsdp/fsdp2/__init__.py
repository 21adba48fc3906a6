"""PyTorch's `fully_shard`, on this package's engine: the same names, classes and methods.

``from megatron_fsdp.fsdp2 import fully_shard`` instead of ``from torch.distributed.fsdp import fully_shard``.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)

from megatron_fsdp.fsdp2.install import install
from megatron_fsdp.fsdp2.module import share_comm_ctx
from megatron_fsdp.fsdp2.shard import fully_shard, fully_shard_optimizer

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "fully_shard_optimizer",
    "install",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
