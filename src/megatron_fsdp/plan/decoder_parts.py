"""What a causal language model of transformers is made of, and copies of it that may be taken apart."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_fsdp.errors import ConfigurationError

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f")


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder, as attribute names.

    Attributes:
        base: Name of the base model in the model.
        layers: Of the list of layers in the base model.
        embeddings: Of the base model.
        norms: Of the base model, behind the layers.
        head: Of the model; None: it has none.
    """

    base: str
    layers: str
    embeddings: tuple[str, ...]
    norms: tuple[str, ...]
    head: str | None


def decoder_parts(model: nn.Module, axis: str) -> DecoderParts:
    """Find the parts of a decoder.

    Args:
        model: A causal language model of transformers.
        axis: What they are needed for, such as "pp"; for the errors.

    Raises:
        ConfigurationError: The model is no such decoder.
    """
    base: Any = getattr(model, "base_model", None)
    if not isinstance(base, nn.Module) or base is model or text_config(model) is None:
        raise _no_decoder(model, axis, "it is no causal language model of transformers")
    base_name = next((name for name, child in model.named_children() if child is base), None)
    lists = [(name, child) for name, child in base.named_children() if isinstance(child, nn.ModuleList) and len(child)]
    if base_name is None or not lists:
        raise _no_decoder(model, axis, "its base model has no list of layers")
    layers = max(lists, key=lambda entry: len(entry[1]))[0]
    output: Any = model.get_output_embeddings()  # type: ignore[operator]  # a method of transformers' models
    head = next((name for name, child in model.named_children() if output is not None and child is output), None)
    return DecoderParts(base_name, layers, *_ends(model, base, layers, head, axis), head)


def _ends(
    model: nn.Module, base: nn.Module, layers: str, head: str | None, axis: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of embeddings and of final norms."""
    embeddings: list[str] = []
    norms: list[str] = []
    unknown = [name for name, _ in base.named_parameters(recurse=False)]
    for name, child in base.named_children():
        if name == layers or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.Embedding):
            embeddings.append(name)
        else:
            (norms if name in _FINAL_NORMS else unknown).append(name)
    for name, child in model.named_children():
        if child is not base and name != head and any(True for _ in child.parameters()):
            unknown.append(name)
    if unknown:
        raise _no_decoder(model, axis, f"it has parts of no known place ({', '.join(unknown)})")
    return tuple(embeddings), tuple(norms)


def _no_decoder(model: nn.Module, axis: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(model).__name__} cannot be divided over {axis}, since {reason}; use {axis}=1, or give the model as one "
        f"rank of that axis computes it, with inputs="
    )


def text_config(model: nn.Module) -> Any:
    """The config of the language model; None where the model has none."""
    config: Any = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config() if callable(get_text_config) else config


def copy_of_modules(model: nn.Module) -> nn.Module:
    """Modules and configs of their own that share all tensors with the model's."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def itemsize_of(model: nn.Module) -> int:
    """Bytes of an element of activations: that of most parameters."""
    sizes: dict[int, int] = {}
    for param in model.parameters():
        if param.is_floating_point():
            sizes[param.dtype.itemsize] = sizes.get(param.dtype.itemsize, 0) + param.numel()
    return max(sizes, key=lambda size: sizes[size])
