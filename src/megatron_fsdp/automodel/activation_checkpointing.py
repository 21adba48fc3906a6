"""Which modules of a decoder are recomputed in backward."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_fsdp.automodel.architecture import find_layers, text_config
from megatron_fsdp.automodel.forwards import recompute_in_backward
from megatron_fsdp.errors import ConfigurationError

_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute each decoder layer: what stays from forward is one hidden state per layer.

    Raises:
        ConfigurationError: The model has no layers.
    """
    for layer in find_layers(model).modules():
        recompute_in_backward(layer)
    _switch_cache_off(model)


def checkpoint_mlps(model: nn.Module) -> None:
    """Recompute the MLP (or mixture of experts) of each decoder layer.

    Raises:
        ConfigurationError: The model has no layers, or one of them no module of a known name.
    """
    for name, layer in find_layers(model).named():
        found = [part for part_name, part in layer.named_children() if part_name in _MLP_NAMES]
        if not found:
            raise ConfigurationError(
                f"activation_checkpointing=True, but {name} ({type(layer).__name__}) has no module called "
                f"{', '.join(_MLP_NAMES)} to recompute; set it to False"
            )
        for part in found:
            recompute_in_backward(part)
    _switch_cache_off(model)


def _switch_cache_off(model: nn.Module) -> None:
    """A key and value cache would be written to a second time by recomputation."""
    for config in (getattr(model, "config", None), text_config(model)):
        if hasattr(config, "use_cache"):
            settable: Any = config
            settable.use_cache = False
