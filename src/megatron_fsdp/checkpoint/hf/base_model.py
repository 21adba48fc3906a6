"""The model whose weights a Hugging Face folder holds: what was wrapped, without adapters that were added later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from megatron_fsdp.checkpoint.hf.live import LiveTensor, live_tensors
from megatron_fsdp.errors import ConfigurationError

_COPIES = {"modules_to_save", "original_module", "token_adapter", "trainable_tokens_delta"}


def base_tensors(module: nn.Module) -> tuple[nn.Module, list[LiveTensor]]:
    """An unwrapped model and its tensors; of a peft model the base and its tensors, as they were called before.

    Raises:
        ConfigurationError: Adapters hold whole copies of modules, which would not be loaded.
    """
    if not getattr(module, "peft_config", None):
        return module, live_tensors(module)
    peft_model: Any = module
    base, tuner_prefix = module, "lora_"
    if hasattr(module, "get_base_model"):  # not where transformers' own add_adapter put them in
        base = peft_model.get_base_model()
        tuner_prefix = str(getattr(peft_model.base_model, "prefix", tuner_prefix))
    added = _added_names(base)
    found = []
    for tensor in live_tensors(base):
        parts = tensor.name.split(".")
        if _COPIES.intersection(part for alias in tensor.aliases for part in alias.split(".")):
            raise ConfigurationError(
                f"{tensor.name}: adapters with modules_to_save or trainable tokens hold copies of base weights; load "
                "the base model before adding the adapters"
            )
        if not any(part.startswith(tuner_prefix) for part in parts) and not _is_inside(tensor.name, added):
            aliases = tuple(_without_base_layer(alias) for alias in tensor.aliases)
            found.append(replace(tensor, name=_without_base_layer(tensor.name), aliases=aliases))
    return base, found


def _added_names(base: nn.Module) -> set[str]:
    """What adapters have added to layers, as peft's layers list it (AdaLoRA's ranknum has no prefix)."""
    added: set[str] = set()
    for name, part in base.named_modules():
        listed: Any = (getattr(part, "adapter_layer_names", ()), getattr(part, "other_param_names", ()))
        added.update(f"{name}.{own}" for names in listed if isinstance(names, tuple) for own in names)
    return added


def _is_inside(name: str, modules: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))


def _without_base_layer(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")
