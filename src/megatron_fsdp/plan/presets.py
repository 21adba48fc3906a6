"""Published models by name, as the fields of their transformers configs that decide shapes (pure data)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.names import nearest_name


def _llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int, **more: Any) -> dict[str, Any]:
    """Fields that families like Llama share; the vocabulary is that of Llama 3."""
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        **more,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "vocab_size": 50257, "n_embd": hidden, "n_layer": layers, "n_head": heads}


def _qwen3_moe(hidden: int, inner: int, expert: int, layers: int, heads: int) -> dict[str, Any]:
    shared = _llama(hidden, inner, layers, heads, 4, model_type="qwen3_moe", vocab_size=151936, head_dim=128)
    routing = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "norm_topk_prob": True}
    return {**shared, **routing}


def _mixtral(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    shared = _llama(hidden, inner, layers, heads, 8, model_type="mixtral", vocab_size=32000)
    return {**shared, "num_local_experts": 8, "num_experts_per_tok": 2}


def _qwen2(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return _llama(hidden, inner, layers, heads, key_heads, model_type="qwen2", vocab_size=vocab, **more)


_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, vocab_size=32000),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-3-405b": _llama(16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, model_type="mistral", vocab_size=32000, sliding_window=None),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 1536, 94, 64),
    "deepseek-v3": _DEEPSEEK_V3,
}
"""Name -> config fields. DeepSeek-V3 is the main model, without the layer that predicts a second token."""


def preset_config(name: str) -> dict[str, Any]:
    """The config fields of a published model.

    Raises:
        ConfigurationError: There is no preset of this name.
    """
    if name not in PRESETS:
        raise ConfigurationError(f"there is no preset {name!r}; {nearest_name(name, PRESETS)}")
    return dict(PRESETS[name])
