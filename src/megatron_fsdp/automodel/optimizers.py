"""One call that makes an optimizer fit a parallel model, whatever the strategy."""

from __future__ import annotations

import torch
from torch import nn

from megatron_fsdp.fully_shard import fully_shard_optimizer
from megatron_fsdp.megatron_fsdp import MegatronFSDP


def connect_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Connect an optimizer that was built on `model.parameters()`, where the strategy needs it.

    Args:
        model: What a manager, `from_pretrained` or `from_config` returned.
        optimizer: Built on its parameters, after that.

    Returns:
        The same optimizer.

    Raises:
        ConfigurationError: It holds parameters of another model.
    """
    return fully_shard_optimizer(optimizer) if isinstance(model, MegatronFSDP) else optimizer
