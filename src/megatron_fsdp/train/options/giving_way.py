"""Which values of a preset give way to what a user gives, so that both make sense together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "normalization",
    "norm_epsilon",
    "qk_layernorm",
    "swiglu",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "transformer_impl",
)
"""Options that a configuration of transformers answers."""

_SHARDING = ("use_megatron_fsdp", "data_parallel_sharding_strategy")

_ANY = object()

GIVING_WAY: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("hf_config", _ANY, SHAPE),
    ("hf_model", _ANY, SHAPE),
    ("lr_warmup_iters", _ANY, ("lr_warmup_fraction",)),
    ("lr_warmup_fraction", _ANY, ("lr_warmup_iters",)),
    ("lr_decay_style", "constant", ("min_lr", "lr_decay_iters")),
    ("optimizer", "sgd", ("adam_beta1", "adam_beta2", "adam_eps")),
    ("bf16", _ANY, ("auto_bf16",)),
    ("fp16", _ANY, ("auto_bf16",)),
    ("accumulate_allreduce_grads_in_fp32", True, ("grad_reduce_in_bf16",)),
    ("megatron_fsdp_grad_comm_dtype", _ANY, ("grad_reduce_in_bf16",)),
    ("use_torch_fsdp2", True, _SHARDING),
    ("use_megatron_fsdp", False, _SHARDING),
)
"""(option that is given, its value or any, options of a preset that give way)."""


def giving_way(preset: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """The names of options of a preset that give way.

    Args:
        preset: Values by the name of the option.
        given: What the user gave, in the same form.
    """
    dropped = {
        name
        for option, value, names in GIVING_WAY
        if option in given and (value is _ANY or given[option] == value)
        for name in names
    }
    if "lr" in given and "min_lr" in preset and given["lr"] < preset["min_lr"]:
        dropped.add("min_lr")
    return (name for name in preset.keys() & dropped if name not in given)
