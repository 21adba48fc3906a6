"""Builds the model of a run: this package's decoder or a configuration of transformers; counts its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fsdp.config.hf_config import build_from_config, read_config
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.train.models.decoder import Decoder, ModelShape, next_token_loss, recompute
from megatron_fsdp.train.options import ModelOptions, flag_for
from megatron_fsdp.train.options.checks import uses_transformers
from megatron_fsdp.train.options.job import Job


def model_shape(options: ModelOptions, vocab_size: int) -> ModelShape:
    """Return the shape of the decoder; the vocabulary of the data is rounded up."""
    num_layers, dim, num_heads, padded = _required_sizes(options, vocab_size)
    positions = options.max_position_embeddings or options.seq_length or 0
    is_learned = options.position_embedding_type == "learned_absolute"
    if is_learned and positions == 0:
        raise ConfigurationError("--seq-length or --max-position-embeddings is missing: learned positions need one")
    return ModelShape(
        vocab_size=padded,
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        hidden_dim=options.ffn_hidden_size or 4 * dim,
        num_query_groups=options.num_query_groups,
        kv_channels=options.kv_channels,
        learned_positions=positions if is_learned else 0,
        rotary_base=options.rotary_base,
        normalization=options.normalization,
        norm_epsilon=options.norm_epsilon,
        normalizes_query_key=options.qk_layernorm,
        is_gated=options.swiglu,
        has_bias=options.add_bias_linear,
        ties_embeddings=not options.untie_embeddings_and_output_weights,
        init_std=options.init_method_std,
    )


def build_decoder(job: Job, vocab_size: int, device: torch.device) -> Decoder:
    """Build the decoder, the same on every rank, in the dtype of its weights; on meta if the job asks for it."""
    training = job.options.training
    shape = model_shape(job.options.model, vocab_size)
    torch.manual_seed(training.seed)
    with torch.device("meta" if job.options.parallel.init_model_with_meta_device else device):
        decoder = Decoder(shape)
    decoder = decoder.to(torch.float32 if job.engine == "torch_fsdp2" else job.dtype)
    if training.recompute_granularity is not None:
        recompute(decoder, training.recompute_granularity, training.recompute_num_layers)
    return decoder


def transformers_config(options: ModelOptions, vocab_size: int) -> Any:
    """Return the configuration of a transformers model: that of a file or folder, or one with the shape of the options.

    A shape becomes Llama, with experts Mixtral; with normalised queries and keys Qwen3, with experts Qwen3-MoE. Its
    vocabulary is the data's, rounded up.
    """
    source = options.source
    if source is None:
        return _config_of_shape(options, vocab_size)
    config = read_config(source)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{source} is the config of an encoder-decoder ({config.model_type}), and the trainer trains decoders, "
            "which are a part of it: give the folder of a causal language model"
        )
    return config


_NO_PART_OF_A_MODEL = (
    *("init_std", "initializer_range", "_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"),
    *("id2label", "label2id", "return_dict", "output_attentions", "output_hidden_states", "problem_type"),
)
"""Fields of configurations that do not change a trained model's result."""


def config_values(options: ModelOptions, vocab_size: int) -> dict[str, Any]:
    """Return the fields of the built configuration, those of its parts included, by name."""
    if uses_transformers(options):
        return dict(_flat(transformers_config(options, vocab_size).to_dict()))
    shape = model_shape(options, vocab_size)
    found = {**asdict(shape), "kv_channels": shape.head_dim, "num_query_groups": shape.groups}
    return dict(_flat({**found, "rotary_base": None if shape.learned_positions else shape.rotary_base}))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and "model_type" in value:  # of a part, such as the text's
            yield from _flat(value, f"{prefix}{name}.")
        elif name not in _NO_PART_OF_A_MODEL:
            yield f"{prefix}{name}", value


def check_fits(config: Any, vocab_size: int, seq_length: int) -> None:
    """Check the data against a model of transformers."""
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


def model_flops(job: Job, vocab_size: int) -> float:
    """Count the FLOPs of a sample's forward, loss and backward; NaN for a model that cannot run without values.

    A multiply-add is two; causal attention counts as if every position saw every other, and recomputation does not
    count, as in "model FLOPs utilization" (Chowdhery et al. 2022, PaLM, appendix B). Attention is counted as its plain
    products, whichever kernel the run uses; experts as if every one got as many tokens as any other.
    """
    model: nn.Module
    if uses_transformers(job.options.model):
        config = transformers_config(job.options.model, vocab_size)
        model = build_from_config(config, torch.bfloat16).to(torch.bfloat16)  # the dtype of grouped products on meta
    else:
        with torch.device("meta"):
            model = Decoder(model_shape(job.options.model, vocab_size))
    tokens = torch.zeros((1, job.seq_length), dtype=torch.int64, device="meta")

    def loss(result: Any) -> Tensor:
        return next_token_loss(getattr(result, "logits", result), tokens)

    try:
        found = profile_compute(model, tokens, unit_names=("",), loss_fn=loss, kernels="math")
    except (RuntimeError, NotImplementedError, ConfigurationError):  # its forward asks for values
        return math.nan
    return float(found.forward_flops + found.backward_flops)


def _required_sizes(options: ModelOptions, vocab_size: int) -> list[int]:
    """Return layers, width and heads, and the vocabulary as `--make-vocab-size-divisible-by` rounds it up."""
    found = {name: getattr(options, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    if missing := ", ".join(flag_for(name) for name, size in found.items() if size is None):
        raise ConfigurationError(
            f"{missing} missing: give the shape of the model, a --preset, --hf-config or --hf-model"
        )
    multiple = options.make_vocab_size_divisible_by
    return [*found.values(), -(-vocab_size // multiple) * multiple]


def _config_of_shape(options: ModelOptions, vocab_size: int) -> Any:
    transformers: Any = require("transformers", "--transformer-impl transformers")
    num_layers, dim, num_heads, padded = _required_sizes(options, vocab_size)
    if options.kv_channels is None and dim % num_heads:
        raise ConfigurationError(
            f"--hidden-size {dim} with --num-attention-heads {num_heads} is not possible: give a multiple, or "
            "--kv-channels"
        )
    inner = options.ffn_hidden_size or 4 * dim
    shape: dict[str, Any] = {
        "vocab_size": padded,
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
    if options.num_experts is None and options.qk_layernorm:
        return transformers.Qwen3Config(**shape)
    if options.num_experts is None:
        biases = options.add_bias_linear
        return transformers.LlamaConfig(**shape, attention_bias=biases, mlp_bias=biases)
    chosen = options.moe_router_topk
    if not options.qk_layernorm:
        shape["intermediate_size"] = options.moe_ffn_hidden_size or inner
        return transformers.MixtralConfig(**shape, num_local_experts=options.num_experts, num_experts_per_tok=chosen)
    return transformers.Qwen3MoeConfig(
        **shape,
        num_experts=options.num_experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=options.moe_ffn_hidden_size or inner,
        norm_topk_prob=True,
    )
