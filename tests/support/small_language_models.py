"""Small language models of transformers, one of each kind that computes differently."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

_SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "use_cache": False}
_MIXTRAL = {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN3_MOE = {**_SHAPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_DEEPSEEK = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}

SMALL_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", _SHAPE, {}),
    "llama-eager-attention": ("llama", _SHAPE, {"attn_implementation": "eager"}),
    "llama-bf16": ("llama", _SHAPE, {"dtype": torch.bfloat16}),
    "qwen2-tied": ("qwen2", {**_SHAPE, "tie_word_embeddings": True}, {}),
    "gpt2-dropout": ("gpt2", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM"}, {}),
    "mixtral": ("mixtral", _MIXTRAL, {}),
    "mixtral-balanced-loss": ("mixtral", {**_MIXTRAL, "output_router_logits": True}, {}),
    "qwen3-moe": ("qwen3_moe", _QWEN3_MOE, {}),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK, {}),
}
"""Name -> model type, fields of its config, and options of `from_config`."""

LAYERS = 3


def build_small(name: str, **options: Any) -> nn.Module:
    """A model of the table in training mode; `options` go to `from_config`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields, own = SMALL_MODELS[name]
    factory: Any = AutoModelForCausalLM
    model: Any = factory.from_config(AutoConfig.for_model(kind, **fields), **{**own, **options})
    trained: nn.Module = model.train()
    return trained


def unit_names(name: str) -> list[str]:
    """The root and the layers of a model of the table."""
    layers = "transformer.h" if name.startswith("gpt2") else "model.layers"
    return ["", *(f"{layers}.{index}" for index in range(LAYERS))]


def folder_with_code(folder: Path) -> Path:
    """Make a folder of a model whose classes lie beside its weights; when they are imported, `has_run` appears."""
    folder.mkdir()
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}), encoding="utf-8")
    code = f"import pathlib, transformers\npathlib.Path({str(folder / 'has_run')!r}).touch()\n"
    classes = "class OwnConfig(transformers.PretrainedConfig): ...\nclass OwnModel: ...\n"
    (folder / "own.py").write_text(code + classes, encoding="utf-8")
    return folder
