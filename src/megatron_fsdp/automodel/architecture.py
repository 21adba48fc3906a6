"""The structure of a model of transformers, read from the module: decoder layers and numbers of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_fsdp.errors import ConfigurationError

IGNORED_LABEL = -100
"""The label of ignored positions, as in transformers and torch."""

_KNOWN_PATHS = (
    *("model.layers", "layers", "model.language_model.layers", "language_model.model.layers", "language_model.layers"),
    *("transformer.h", "h", "gpt_neox.layers", "model.decoder.layers", "decoder.layers"),
)


@dataclass(frozen=True)
class Layers:
    """The decoder layers of a model."""

    path: str  # dotted name of the list, such as "model.layers"
    container: nn.ModuleList | nn.ModuleDict  # the latter in a pipeline stage, with the original indices as keys

    def named(self) -> list[tuple[str, nn.Module]]:
        """Return (dotted name in the model, layer), in order."""
        return [(f"{self.path}.{name}", layer) for name, layer in self.container.named_children()]

    def modules(self) -> list[nn.Module]:
        """Return the layers, in order."""
        return list(self.container.children())


def find_layers(model: nn.Module) -> Layers:
    """Find the decoder layers: at transformers' usual places, else the longest list of modules."""
    parts = dict(model.named_modules(remove_duplicate=False))
    for path in _KNOWN_PATHS:
        found = parts.get(path)
        if isinstance(found, nn.ModuleList | nn.ModuleDict) and len(found):
            return Layers(path, found)
    lists = [(name, part) for name, part in parts.items() if isinstance(part, nn.ModuleList) and len(part)]
    if not lists:
        raise ConfigurationError(
            f"{type(model).__name__} has no list of layers (an nn.ModuleList such as model.layers), so there is "
            "nothing to shard or split by layers; give a decoder model of transformers, or use fully_shard_model"
        )
    return Layers(*max(lists, key=lambda entry: len(entry[1])))


def lists_of_layers(module: nn.Module) -> Iterator[nn.ModuleList | nn.ModuleDict]:
    """Yield the outermost lists of modules with a forward of their own: no lists of lists, and none inside layers."""
    for child in module.children():
        holds_lists = any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in child.children())
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not holds_lists:
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from lists_of_layers(child)


def parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each parameter to all its names; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def text_config(model: nn.Module) -> Any:
    """Return the config of the language model, also of a multimodal one; None without a config."""
    config: Any = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config() if callable(get_text_config) else config


def layer_configs(model: nn.Module) -> list[Any]:
    """Return the config of each layer of the language model if they differ, else the one of all."""
    config = text_config(model)
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def head_counts(config: Any) -> tuple[int, int] | None:
    """Return (query heads, key and value heads) of a config; None if it has none."""
    queries = getattr(config, "num_attention_heads", None)
    if not isinstance(queries, int):
        return None
    keys = getattr(config, "num_key_value_heads", None)
    return queries, keys if isinstance(keys, int) else queries


def model_type(model: nn.Module) -> str:
    """Return transformers' name of the family ("llama", "qwen3"); empty without a config."""
    return str(getattr(text_config(model), "model_type", "") or "")
