"""What every manager asks of a model."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.megatron_fsdp import MegatronFSDP

_PARALLEL = (FSDPModule, MegatronFSDP, nn.parallel.DistributedDataParallel)


def refuse_parallel_model(model: nn.Module) -> None:
    """Refuse a model that a manager has made parallel, whatever the strategy.

    Raises:
        ConfigurationError: It has.
    """
    found = next((part for part in model.modules() if isinstance(part, _PARALLEL)), None)
    if found is not None:
        raise ConfigurationError(
            f"the model is parallel already (it has a {type(found).__name__}); give one that no manager has had"
        )
