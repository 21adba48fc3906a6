"""Megatron-FSDP in native PyTorch: shard parameters, gradients and optimizer state with one call.

    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp_shard",
    fsdp_unit_modules=[Block])

An independent implementation of the interface of the `megatron_fsdp` package, not affiliated with NVIDIA.

The names are imported at their first use.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from megatron_fsdp.comm.reduction import reduce_scatter_with_fp32_accumulation
    from megatron_fsdp.ddp import DistributedDataParallel
    from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron_fsdp.engine.matched_passes import meet_ranks
    from megatron_fsdp.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
    from megatron_fsdp.megatron_fsdp import MegatronFSDP
    from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
    from megatron_fsdp.optim.adamw8bit import AdamW8bit
    from megatron_fsdp.optim.chained import ChainedOptimizer
    from megatron_fsdp.optim.full_tensor.step import steps_whole_tensors
    from megatron_fsdp.sharding.mesh import FSDPDistributedIndex

__all__ = [
    "AdamW8bit",
    "ChainedOptimizer",
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
    "meet_ranks",
    "reduce_scatter_with_fp32_accumulation",
    "steps_whole_tensors",
]

_HOMES = {
    "AdamW8bit": "optim.adamw8bit",
    "ChainedOptimizer": "optim.chained",
    "DistributedDataParallel": "ddp",
    "DistributedDataParallelConfig": "distributed_data_parallel_config",
    "FSDPDistributedIndex": "sharding.mesh",
    "MegatronFSDP": "megatron_fsdp",
    "MixedPrecisionPolicy": "mixed_precision",
    "fully_shard": "fully_shard",
    "fully_shard_model": "fully_shard",
    "fully_shard_optimizer": "fully_shard",
    "meet_ranks": "engine.matched_passes",
    "reduce_scatter_with_fp32_accumulation": "comm.reduction",
    "steps_whole_tensors": "optim.full_tensor.step",
}
"""Public name -> the module that defines it."""


class _Package(ModuleType):
    """Module type of this package: its `fully_shard` stays the function after the import of that submodule."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):  # the import of a submodule sets it here
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name, or a submodule."""
    home = _HOMES.get(name)
    if home is not None:
        found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return found
    submodule = f"{__name__}.{name}"
    if not name.startswith("_"):
        try:
            return import_module(submodule)
        except ModuleNotFoundError as error:
            if error.name != submodule:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
