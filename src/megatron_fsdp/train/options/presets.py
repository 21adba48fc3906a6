"""Presets: options that suit a model size; what a user gives wins over every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp.errors import ConfigurationError

_DECODER: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "auto_bf16": True,
    "grad_reduce_in_bf16": True,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "exit_duration_in_mins": 5.0,
}
"""Options of all four sizes: a decoder with rotary positions, fully sharded, for five minutes at most."""


def _preset(
    shape: tuple[int, int, int, int], seq_length: int, micro_batch: int, steps: int, lr: float
) -> Mapping[str, Any]:
    """Make a preset of a number of layers, width, heads and inner width."""
    num_layers, hidden_size, num_attention_heads, ffn_hidden_size = shape
    return {
        **_DECODER,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "seq_length": seq_length,
        "micro_batch_size": micro_batch,
        "train_iters": steps,
        "lr": lr,
        "min_lr": lr / 10,
        "lr_warmup_fraction": 0.1,
        "eval_interval": max(1, steps // 5),
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _preset((2, 64, 2, 176), 64, 4, 30, 3e-3),
    "cpu-small": _preset((4, 448, 7, 1216), 256, 4, 300, 2e-3),
    "gpu-125m": _preset((12, 896, 14, 2688), 1024, 16, 600, 1e-3),
    "gpu-1b": _preset((20, 2048, 16, 5504), 2048, 4, 600, 4e-4),
}


def find_preset(name: str) -> Mapping[str, Any]:
    """Return the options of a preset.

    Raises:
        ConfigurationError: There are none.
    """
    if name not in PRESETS:
        raise ConfigurationError(f"preset {name!r} does not exist: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
