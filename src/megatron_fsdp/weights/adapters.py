"""Adapters of peft on the wire: added to base weights as peft does, or alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.hf.adapters import adapter_files, peft_model
from megatron_fsdp.checkpoint.hf.live import FileTensor, LiveTensor
from megatron_fsdp.errors import ConfigurationError

_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class Merge:
    """One LoRA adapter of a layer, whose product is added to the layer's base weight."""

    layer: Any
    adapter: str

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """The adapter's live factors by the attribute of the layer."""
        found = {}
        for attribute in _FACTORS:
            factors = getattr(self.layer, attribute)
            if self.adapter in factors:
                factor = factors[self.adapter]
                found[attribute] = factor if isinstance(factor, torch.Tensor) else factor.weight
        return found

    def add_to(self, weight: torch.Tensor, full: Mapping[str, torch.Tensor]) -> None:
        """Add the product to the full base weight, by peft's own function on a copy of the layer with full factors."""
        layer: Any = copy.copy(self.layer)
        layer._modules, layer._parameters = dict(layer._modules), dict(layer._parameters)
        for attribute, factor in full.items():
            layer._modules.pop(attribute, None)
            is_embedding = attribute.startswith("lora_embedding")
            held = factor if is_embedding else SimpleNamespace(weight=factor)
            object.__setattr__(layer, attribute, {self.adapter: held})
        with torch.no_grad():
            weight += layer.get_delta_weight(self.adapter)


def merges_of(base: nn.Module) -> dict[int, tuple[Merge, ...]]:
    """List the active LoRA adapters of a peft model by the id of the weight that each is added to.

    Raises:
        ConfigurationError: An adapter is of another kind, or does more than to add a product of two matrices.
    """
    from peft.tuners.lora import Conv2d, Embedding, Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[int, tuple[Merge, ...]] = {}
    for name, layer in base.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        held: Any = layer
        active = [
            adapter for adapter in held.active_adapters if any(adapter in getattr(held, at, ()) for at in _FACTORS)
        ]
        problem = None
        if not isinstance(layer, Linear | Embedding | Conv2d) or not hasattr(layer, "get_delta_weight"):
            problem = f"is a {type(layer).__name__}"
        elif held.merged_adapters:
            problem = "is merged into its base already, so that call unmerge_adapter() first"
        elif any(adapter in held.lora_variant for adapter in active):
            problem = "uses a variant of LoRA (such as DoRA)"
        elif any(held.lora_bias.get(adapter) for adapter in active):
            problem = "adds to the bias (lora_bias)"
        if problem is not None:
            raise ConfigurationError(
                f'adapters="merged": the adapter of {name} {problem}; only LoRA on linear, convolution and embedding '
                'layers is merged here, so send the adapters alone (adapters="only")'
            )
        if not held.disable_adapters:
            found[id(held.get_base_layer().weight)] = tuple(Merge(held, adapter) for adapter in active)
    return found


def adapter_tensors(module: Any) -> tuple[list[LiveTensor], dict[str, FileTensor]]:
    """Return the tensors of a peft model's active adapter, and by key the entries of the file of `save_adapter`."""
    active = getattr(module, "active_adapter", "default")
    name = active if isinstance(active, str) else next(iter(getattr(module, "peft_config", {})), "default")
    return adapter_files(peft_model(module, name), name)
