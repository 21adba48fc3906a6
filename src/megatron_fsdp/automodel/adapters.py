"""Adapters of peft on a model that has no memory yet."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.runtime.random_state import same_random_numbers


def add_adapters(model: nn.Module, peft_config: Any) -> nn.Module:
    """Put adapters on a model and freeze the rest; the adapters exist, with values that are the same on every rank.

    Args:
        model: On the meta device.
        peft_config: Such as `peft.LoraConfig`.

    Returns:
        The `PeftModel` around it; its adapters have the dtype of the model.

    Raises:
        ConfigurationError: peft is not installed, or does not take the configuration for this model.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigurationError("peft_config is given and peft is not installed; pip install peft") from error
    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigurationError(f"peft_config is a {type(peft_config).__name__}; give a configuration of peft")
    groups = [dist.group.WORLD] if dist.group.WORLD is not None else []
    with same_random_numbers(groups, torch.device("cpu")):
        try:
            made: nn.Module = peft.get_peft_model(model, peft_config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigurationError(
                f"peft does not take this configuration: {' '.join(str(error).split())}"
            ) from error
    return made
