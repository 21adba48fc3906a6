"""Build models on the meta device from a name, a config, an import path or a function; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.config.hf_config import build_from_config, first_words, read_config
from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.plan.setup import one_of

ModelSpec = str | Path | Mapping[str, Any] | Callable[[], nn.Module] | nn.Module
"""The ways to specify a model; see `build_meta_model`."""

_EXPERTS = "_experts_implementation"


def build_meta_model(
    spec: ModelSpec, dtype: torch.dtype | None = None, *, default: torch.dtype | None = None
) -> nn.Module:
    """Build a model without memory, in training mode.

    Args:
        spec: One of

            * the name of a preset, such as "llama-3-8b" (`PRESETS`);
            * the path of a folder with a `config.json` of transformers, or of such a file;
            * the fields of such a config as a mapping, `model_type` among them, or a config object;
            * an import path "package.module:function", or the function itself: it is called without arguments with the
              meta device as default;
            * a model that is on the meta device already; it is returned as it is.
        dtype: Of all floating-point parameters that the family does not keep in another; None: what the config says,
            else torch's default. Functions and models have their own and take none.
        default: In place of what a config says; functions and models ignore it.

    Returns:
        The model; of a config the whole one that it names.

    Raises:
        ConfigurationError: There is no such preset, file, function or family, transformers is missing, or parameters
            of the model have memory.
    """
    if isinstance(spec, str):
        spec = _resolve(spec)
    if not callable(spec):
        return _checked(_from_config(spec, dtype, default))
    if dtype is not None:
        raise ConfigurationError(f"dtype={dtype} is for configs; a function or a model decides on its own")
    if isinstance(spec, nn.Module):
        return _checked(spec)
    with torch.device("meta"):
        built: object = spec()
    if not isinstance(built, nn.Module):
        name = getattr(spec, "__qualname__", spec)
        raise ConfigurationError(f"{name} returned a {type(built).__name__}; it must return a model")
    return _checked(built)


def _resolve(text: str) -> Mapping[str, Any] | Path | Callable[[], nn.Module]:
    """Resolve a string to a preset's config, a path or a function."""
    if Path(text).exists() and text not in PRESETS:
        return Path(text)
    if ":" in text:
        found = import_by_path(text, "model")
        if not callable(found):
            raise ConfigurationError(f"{text!r} is a {type(found).__name__}; give a function or class to call")
        return found
    what = f"{text!r} is no preset, no path of a config and no import path 'package.module:function'"
    return one_of(what, text, PRESETS)


def _from_config(given: Any, dtype: torch.dtype | None, default: torch.dtype | None) -> nn.Module:
    transformers: Any = require(
        "transformers",
        "a model of this config",
        instead="give an import path 'package.module:function' that builds the model",
    )
    if isinstance(given, Path):
        if not given.exists():
            raise ConfigurationError(f"there is no such file or folder as {given}; nothing is downloaded")
        given = read_config(given)
    config: Any = _config(transformers, given) if isinstance(given, Mapping) else given
    if not isinstance(config, transformers.PretrainedConfig):
        raise ConfigurationError(
            f"the model is given as a {type(given).__name__}; give a preset, a path, a config, a function or a model"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"dtype={dtype!r} is no torch.dtype; give one such as torch.bfloat16")
    said = default or getattr(config, "dtype", None) or torch.get_default_dtype()
    return build_from_config(config, dtype or said, None)


def _config(transformers: Any, fields: Mapping[str, Any]) -> Any:
    kind = fields.get("model_type")
    if kind is None:
        raise ConfigurationError(
            f"the config has no model_type ({', '.join(sorted(fields)[:8]) or 'it is empty'}); give a config.json of "
            "transformers, or add the model_type"
        )
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigurationError(
            f"transformers {transformers.__version__} knows no model_type {kind!r}; use a version that does, or give "
            "an import path 'package.module:function' that builds the model"
        )
    rest = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return transformers.AutoConfig.for_model(kind, **rest)
    except Exception as error:
        raise ConfigurationError(f"the config of {kind!r} is not valid: {first_words(error)}") from error


def _checked(model: nn.Module) -> nn.Module:
    for name, param in model.named_parameters():
        if not param.is_meta:
            raise ConfigurationError(
                f"{name} has memory on {param.device}; build the model under torch.device('meta'), and let "
                "constructors name no device"
            )
    return model


@contextmanager
def balanced_experts(model: nn.Module) -> Iterator[None]:
    """Run fused experts of transformers without values: loops over experts become grouped products.

    The rows of an expert are data; memory depends only on their number, k per token, if one grouped product computes
    all experts, the default of transformers 5. Configs are changed inside the block only.
    """
    found: dict[int, Any] = {
        id(config): config
        for name, part in model.named_modules()
        if name.rpartition(".")[2] == "experts" and (config := getattr(part, "config", None)) is not None
    }
    before = [(config, getattr(config, _EXPERTS, None)) for config in found.values()]
    loops = [(config, implementation) for config, implementation in before if implementation in (None, "eager")]
    for config, _ in loops:
        setattr(config, _EXPERTS, "grouped_mm")
    try:
        yield
    finally:
        for config, implementation in loops:
            setattr(config, _EXPERTS, implementation)


# ---- published models, as the fields of their configs in which they differ from their families' defaults -------------


def _decoder(
    hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, kind: str = "llama", **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **more,
    }


_QWEN3_MOE: Mapping[str, Any] = {"kind": "qwen3_moe", "head_dim": 128, "norm_topk_prob": True}
_KIMI_K2 = {"n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "llama-2-7b": _decoder(4096, 11008, 32, 32, 32, 32000),
    "llama-3-8b": _decoder(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _decoder(8192, 28672, 80, 64, 8, 128256),
    "llama-3-405b": _decoder(16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": _decoder(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "mistral-7b": _decoder(4096, 14336, 32, 32, 8, 32000, "mistral", sliding_window=None),
    "mixtral-8x7b": _decoder(4096, 14336, 32, 32, 8, 32000, "mixtral"),
    "mixtral-8x22b": _decoder(6144, 16384, 56, 48, 8, 32000, "mixtral"),
    "qwen2.5-0.5b": _decoder(896, 4864, 24, 14, 2, 151936, "qwen2", tie_word_embeddings=True),
    "qwen2.5-7b": _decoder(3584, 18944, 28, 28, 4, 152064, "qwen2"),
    "qwen2.5-72b": _decoder(8192, 29568, 80, 64, 8, 152064, "qwen2"),
    "qwen3-30b-a3b": _decoder(2048, 6144, 48, 32, 4, 151936, moe_intermediate_size=768, **_QWEN3_MOE),
    "qwen3-235b-a22b": _decoder(4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536, **_QWEN3_MOE),
    "deepseek-v3": {"model_type": "deepseek_v3", "max_position_embeddings": 163840},
    "kimi-k2": _decoder(7168, 18432, 61, 64, 64, 163840, "deepseek_v3", routed_scaling_factor=2.827, **_KIMI_K2),
}
"""Name -> config fields. DeepSeek-V3 is the main model, without the layer that predicts a second token."""
