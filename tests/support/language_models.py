"""Tiny models of transformers, of many families, and what one process computes with them on a whole batch.

`build(kind)` gives the same weights for the same kind and seed in every process, so a rank can build the reference
itself. Sizes divide by 4, so that up to four tensor-parallel ranks have a head each.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.on_ranks import fixed_seed

VOCABULARY = 96

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 64}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_dropout": 0.0}
_DENSE = {**_TOKENS, **_SIZES, **_HEADS, "pad_token_id": 1, "tie_word_embeddings": False}
_GPT2 = {**_TOKENS, "n_embd": 32, "n_inner": 48, "n_layer": 4, "n_head": 4, "n_positions": 64}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "tie_word_embeddings": True}
_SHORT_WINDOW = {"sliding_window": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTING = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_gqa": ("Llama", {"num_key_value_heads": 2}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma": ("Gemma", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", _GEMMA),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "original_max_position_embeddings": 64}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", {**_EXPERTS, **_ROUTING, **_LATENT}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **_SHORT_WINDOW}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}
"""kind -> (prefix of the classes in transformers, what differs from the common sizes)."""

NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout", "embedding_dropout")


def config_of(kind: str, **changes: Any) -> Any:
    prefix, own = FAMILIES[kind]
    sizes = _GPT2 if prefix == "GPT2" else _DENSE
    name = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, name)(**{**sizes, **own, **changes})
    for field in NO_DROPOUT:
        if hasattr(config, field) and field not in changes:
            setattr(config, field, 0.0)
    return config


def build(kind: str, seed: int = 0, *, attention: str | None = None, **changes: Any) -> Any:
    """A causal language model in float32 with random weights, norms included, in training mode without dropout."""
    with fixed_seed(seed), torch.no_grad():
        factory: Any = transformers.AutoModelForCausalLM
        model = factory.from_config(config_of(kind, **changes), attn_implementation=attention, dtype=torch.float32)
        for name, param in model.named_parameters():
            # Norms start at one or zero and biases at zero: a swap would not be seen.
            if param.ndim == 1 or name.endswith("bias"):
                param.add_(torch.randn(param.shape) * 0.1)
            elif "norm" not in name:
                param.mul_(3.0)  # larger weights, so that wrong ones show
    return model.train()


def batch_of(rows: int = 4, sequence: int = 16, seed: int = 1) -> dict[str, Tensor]:
    """Token ids and labels, (rows, sequence); some labels are -100, unevenly over the rows."""
    with fixed_seed(seed):
        tokens = torch.randint(2, VOCABULARY, (rows, sequence))
    labels = tokens.clone()
    for row in range(rows):
        labels[row, : 1 + row % 3] = -100
    return {"input_ids": tokens, "labels": labels}


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of the next token; labels as of transformers, not yet shifted."""
    shifted = logits[:, :-1].float()
    return nn.functional.cross_entropy(shifted.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def label_count(labels: Tensor) -> int:
    """How many labels count towards `token_loss_sum`."""
    return int((labels[:, 1:] != -100).sum())


LAYERS = 3
SMALL_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama_gqa", {}, {}),
    "llama-eager-attention": ("llama_gqa", {}, {"attn_implementation": "eager"}),
    "llama-bf16": ("llama_gqa", {}, {"dtype": torch.bfloat16}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "gpt2-dropout": ("gpt2", {**dict.fromkeys(NO_DROPOUT[:3], 0.1), "loss_type": "ForCausalLM"}, {}),
    "mixtral": ("mixtral", {}, {}),
    "mixtral-balanced-loss": ("mixtral", {"output_router_logits": True}, {}),
    "qwen3-moe": ("qwen3_moe", {}, {}),
    "deepseek-v3": ("deepseek_v3", {}, {}),
}
"""Models that compute differently: name -> kind, changes of its config, and options of `from_config`."""


def build_small(name: str, **options: Any) -> nn.Module:
    """A model of the table in training mode; `options` go to `from_config`."""
    kind, changes, own = SMALL_MODELS[name]
    config = config_of(kind, vocab_size=100, num_hidden_layers=LAYERS, use_cache=False, **changes)
    factory: Any = transformers.AutoModelForCausalLM
    model: nn.Module = factory.from_config(config, **{**own, **options})
    return model.train()


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
