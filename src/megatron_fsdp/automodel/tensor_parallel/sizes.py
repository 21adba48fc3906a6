"""Whether tensor-parallel ranks can share heads, layers and experts evenly; all is known before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_fsdp.automodel.architecture import head_counts, text_config
from megatron_fsdp.automodel.tensor_parallel.experts import check_experts
from megatron_fsdp.automodel.tensor_parallel.translation import COLWISE, EMBEDDING, LINEAR, parameter_placement
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError


def check_heads(model: nn.Module, styles: Mapping[str, ParallelStyle | str], ranks: int) -> None:
    """See that the ranks divide the heads, where attention is divided by heads.

    Raises:
        ParallelSizeError: They do not.
    """
    if not any(style in ("colwise", "packed_colwise") and in_attention(name) for name, style in styles.items()):
        return
    counts = head_counts(model)
    config = text_config(model)
    found: dict[str, Any] = {}
    if counts is not None:
        found = {"num_attention_heads": counts[0], "num_key_value_heads": counts[1]}
    found |= {key: value for key, value in getattr(config, "__dict__", {}).items() if key.endswith("key_value_heads")}
    for key, value in found.items():
        for count in value if isinstance(value, list | tuple) else [value]:
            if isinstance(count, int) and count % ranks:
                raise ParallelSizeError(
                    f"the model has {key}={count}, which {ranks} tensor-parallel ranks cannot share evenly; choose a "
                    f"tensor-parallel size that divides {count}"
                )


def in_attention(name: str) -> bool:
    """Whether a module's name says that it belongs to attention."""
    return "attn" in name or "attention" in name


def check_module(name: str, module: nn.Module, style: str, ranks: int) -> None:
    """See that a style fits a module.

    Uneven parts are right only where no other module computes with them: gathered outputs, split inputs, embeddings.

    Raises:
        ConfigurationError: It is a style of another kind of module.
        ParallelSizeError: The ranks do not divide what they must share evenly.
    """
    if style == "moe_tp_experts" and hasattr(module, "num_experts"):
        check_experts(name, module, ranks)
    if style in EMBEDDING or isinstance(module, nn.Embedding):
        if not isinstance(module, nn.Embedding) or style not in EMBEDDING | LINEAR:
            raise _wrong_kind(name, module, style, "an nn.Embedding" if style in EMBEDDING else "other modules")
        _check_even(f"{name} (embedding_dim)", module.embedding_dim if style == "colwise" else ranks, ranks)
    elif style in LINEAR:
        if not isinstance(module, nn.Linear):
            raise _wrong_kind(name, module, style, "an nn.Linear or nn.Embedding")
        if style.startswith("packed"):
            width, what = (
                (module.out_features, "out_features") if style in COLWISE else (module.in_features, "in_features")
            )
            _check_even(f"half of {name} ({what})", width // 2, ranks)
        elif style == "colwise":
            _check_even(f"{name} (out_features)", module.out_features, ranks)
        elif style == "rowwise":
            _check_even(f"{name} (in_features)", module.in_features, ranks)


def check_parameter(name: str, param: nn.Parameter, style: str, ranks: int) -> None:
    """See that the ranks divide a parameter that a plan names itself.

    Raises:
        ParallelSizeError: They do not.
    """
    placement = parameter_placement(style, param.ndim)
    if placement.is_shard():
        dim: int = placement.dim  # type: ignore[attr-defined] # it is a Shard
        _check_even(f"{name} (dimension {dim})", param.shape[dim], ranks)


def _check_even(what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise ParallelSizeError(
            f"{what} is {size}, which {ranks} tensor-parallel ranks cannot share evenly; choose a tensor-parallel size "
            f"that divides {size}, or a style that gathers or splits (colwise_gather_output, rowwise_split_input)"
        )


def _wrong_kind(name: str, module: nn.Module, style: str, right: str) -> ConfigurationError:
    return ConfigurationError(
        f"the tensor-parallel plan gives {name}, a {type(module).__name__}, the style {style!r}, which is for {right}; "
        "give it another style, or leave it out of the plan"
    )
