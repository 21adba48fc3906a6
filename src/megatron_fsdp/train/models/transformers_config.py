"""The configuration of transformers for the options of a run, and whether data and ranks fit it."""

from __future__ import annotations

from typing import Any

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.plan.models import read_config
from megatron_fsdp.train.models.build import padded_vocab_size, required_sizes
from megatron_fsdp.train.options.options import ModelOptions


def transformers_config(options: ModelOptions, vocab_size: int) -> Any:
    """Return the configuration of the model: that of a file or folder, or one with the shape of the options.

    A shape becomes Llama, with experts Mixtral; with normalised queries and keys Qwen3, with experts Qwen3-MoE.

    Args:
        options: About the model; `check_model` has seen them.
        vocab_size: Token ids of the data; rounded up where the shape comes from options.

    Raises:
        ConfigurationError: There is no such file, it is no configuration, or a size is missing.
    """
    source = options.hf_model or options.hf_config
    if source is None:
        return _from_shape(options, vocab_size)
    if not source.exists():
        flag = "--hf-model" if options.hf_model is not None else "--hf-config"
        raise ConfigurationError(f"{flag} {source} does not exist: give a local folder or file of transformers")
    return read_config(source)


def check_fits(config: Any, vocab_size: int, seq_length: int) -> int:
    """Check the data against a model of transformers.

    Args:
        config: Of the model.
        vocab_size: Token ids of the data.
        seq_length: Tokens of a sample.

    Returns:
        The token ids that the model knows.

    Raises:
        ConfigurationError: The data has ids that it does not know, or samples have more tokens than it has positions.
    """
    text = config.get_text_config()
    if vocab_size > text.vocab_size:
        raise ConfigurationError(
            f"the data has {vocab_size} token ids and the model knows {text.vocab_size}: tokenise with the model's "
            "own tokenizer (--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER)"
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and seq_length > limit:
        raise ConfigurationError(
            f"--seq-length {seq_length} is more than the {limit} positions of the model: give less"
        )
    return int(text.vocab_size)


def _from_shape(options: ModelOptions, vocab_size: int) -> Any:
    transformers: Any = require("transformers", "--transformer-impl transformers")
    num_layers, dim, num_heads = required_sizes(options)
    if options.kv_channels is None and dim % num_heads:
        raise ConfigurationError(
            f"--hidden-size {dim} with --num-attention-heads {num_heads} is not possible: give a multiple, or "
            "--kv-channels"
        )
    inner = options.ffn_hidden_size or 4 * dim
    shape: dict[str, Any] = {
        "vocab_size": padded_vocab_size(vocab_size, options.make_vocab_size_divisible_by),
        "num_hidden_layers": num_layers,
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": options.num_query_groups or num_heads,
        "head_dim": options.kv_channels or dim // num_heads,
        "max_position_embeddings": options.max_position_embeddings or options.seq_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": options.rotary_base},
        "rms_norm_eps": options.norm_epsilon,
        "initializer_range": options.init_method_std,
        "tie_word_embeddings": not options.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if options.num_experts is None:
        if options.qk_layernorm:
            return transformers.Qwen3Config(**shape)
        return transformers.LlamaConfig(
            **shape, attention_bias=options.add_bias_linear, mlp_bias=options.add_bias_linear
        )
    expert, chosen = options.moe_ffn_hidden_size or inner, options.moe_router_topk
    if options.qk_layernorm:
        return transformers.Qwen3MoeConfig(
            **shape,
            num_experts=options.num_experts,
            num_experts_per_tok=chosen,
            moe_intermediate_size=expert,
            norm_topk_prob=True,
        )
    shape["intermediate_size"] = expert
    return transformers.MixtralConfig(**shape, num_local_experts=options.num_experts, num_experts_per_tok=chosen)
