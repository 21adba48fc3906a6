"""The model whose weights a Hugging Face folder holds: what was wrapped, without adapters that were added later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from megatron_fsdp.checkpoint.hf.live import LiveTensor, live_tensors
from megatron_fsdp.errors import ConfigurationError


def base_tensors(module: nn.Module) -> tuple[nn.Module, list[LiveTensor]]:
    """An unwrapped model and its tensors; of a peft model the base and its tensors, as they were called before.

    Raises:
        ConfigurationError: Adapters hold whole copies of modules, which would not be loaded.
    """
    peft_model: Any = module
    if not getattr(module, "peft_config", None) or not hasattr(module, "get_base_model"):
        return module, live_tensors(module)
    base: nn.Module = peft_model.get_base_model()
    prefix = str(getattr(peft_model.base_model, "prefix", "lora_"))
    found = []
    for tensor in live_tensors(base):
        parts = tensor.name.split(".")
        if "modules_to_save" in parts or "original_module" in parts:
            raise ConfigurationError(
                f"{tensor.name}: adapters with modules_to_save hold copies of base weights; load the base model before "
                "adding the adapters"
            )
        if not any(part.startswith(prefix) for part in parts):
            aliases = tuple(_without_base_layer(alias) for alias in tensor.aliases)
            found.append(replace(tensor, name=_without_base_layer(tensor.name), aliases=aliases))
    return base, found


def _without_base_layer(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")
