"""The options about the model; names as in Megatron-LM where it has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelOptions:
    """What is trained: a shape, or a configuration or folder of Hugging Face transformers.

    Attributes:
        num_layers: Transformer blocks.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the feed-forward layer; default: 4 times the hidden size.
        num_attention_heads: Heads of attention.
        num_query_groups: Heads of keys and values, which query heads share; default: as many as there are heads.
        kv_channels: Width of a head; default: the hidden size by the number of heads.
        seq_length: Tokens of a sample.
        max_position_embeddings: Positions that the model can have; default: the length of a sample.
        position_embedding_type: Learned positions, or rotary ones.
        rotary_base: Base of the rotary frequencies.
        normalization: Of the layers.
        norm_epsilon: Added to the variance.
        qk_layernorm: Normalise queries and keys.
        swiglu: A gated feed-forward layer with SiLU, in place of GELU.
        add_bias_linear: Linear layers have a bias; `--disable-bias-linear` turns it off.
        untie_embeddings_and_output_weights: The output layer has a matrix of its own.
        init_method_std: Standard deviation of initial weights.
        make_vocab_size_divisible_by: The vocabulary of the model is rounded up to a multiple of this.
        num_experts: Experts of each block; default: none. Needs `--transformer-impl transformers`.
        moe_router_topk: Experts for each token.
        moe_ffn_hidden_size: Width of an expert; default: that of the feed-forward layer.
        transformer_impl: Whose classes: this package's decoder, or those of transformers (Llama, Mixtral), which can be
            cut over tensor-, context-, pipeline- and expert-parallel ranks.
        hf_config: A config.json of transformers, or a folder with one: that model with new weights.
        hf_model: A local folder of transformers: that model with its weights, on the tokens of its tokenizer.json.
    """

    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    seq_length: int | None = None
    max_position_embeddings: int | None = None
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_base: float = 10000.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    swiglu: bool = False
    add_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    init_method_std: float = 0.02
    make_vocab_size_divisible_by: int = 128
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    transformer_impl: Literal["local", "transformers"] = "local"
    hf_config: Path | None = None
    hf_model: Path | None = None
