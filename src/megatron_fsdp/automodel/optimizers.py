"""One call that makes an optimizer fit a parallel model, whatever the strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_fsdp.automodel.pipeline_parallel import Pipeline
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import fully_shard_optimizer
from megatron_fsdp.megatron_fsdp import MegatronFSDP


def connect_optimizer(model: Any, optimizer: Any) -> torch.optim.Optimizer:
    """Connect an optimizer that was built on `model.parameters()`, where the strategy needs it, and check that it is.

    Args:
        model: What a manager, `from_pretrained` or `from_config` returned: a module or a `Pipeline`.
        optimizer: Built on its parameters, after that.

    Returns:
        The same optimizer.

    Raises:
        ConfigurationError: It holds other parameters than the model's sharded ones, which are what training updates.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module | Pipeline):
        raise ConfigurationError(
            f"connect_optimizer was given a {type(model).__name__} and a {type(optimizer).__name__}; give the model "
            "first, and then an optimizer of torch"
        )
    if isinstance(model, MegatronFSDP):
        return fully_shard_optimizer(optimizer)
    parts = model.parts if isinstance(model, Pipeline) else [model]
    for part in parts:
        for unit in part.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
    own = {id(param) for part in parts for param in part.parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    strange = sum(id(param) not in own for param in held)
    if strange:
        raise ConfigurationError(
            f"{strange} of the {len(held)} parameters of the optimizer are not the model's sharded ones, so stepping "
            "would train nothing; build it on model.parameters() before the first forward, or after one without "
            "gradients: after a forward with gradients FSDP2 shows gathered weights until backward"
        )
    return optimizer
