"""The decoder of this package for the options of a run."""

from __future__ import annotations

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.models.decoder import Decoder, ModelShape, recompute
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import ModelOptions


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round the size of a vocabulary up, as `--make-vocab-size-divisible-by` says."""
    return -(-vocab_size // multiple) * multiple


def model_shape(options: ModelOptions, vocab_size: int) -> ModelShape:
    """Return the shape of the decoder.

    Args:
        options: About the model; `check_model` has seen them.
        vocab_size: Token ids of the data, before it is rounded up.

    Raises:
        ConfigurationError: A size is missing, or sizes do not fit each other.
    """
    num_layers, dim, num_heads = required_sizes(options)
    positions = options.max_position_embeddings or options.seq_length or 0
    is_learned = options.position_embedding_type == "learned_absolute"
    if is_learned and positions == 0:
        raise ConfigurationError("--seq-length or --max-position-embeddings is missing: learned positions need one")
    return ModelShape(
        vocab_size=padded_vocab_size(vocab_size, options.make_vocab_size_divisible_by),
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


def required_sizes(options: ModelOptions) -> tuple[int, int, int]:
    """Layers, width and heads.

    Raises:
        ConfigurationError: One is missing.
    """
    sizes = (options.num_layers, options.hidden_size, options.num_attention_heads)
    flags = ("--num-layers", "--hidden-size", "--num-attention-heads")
    missing = [flag for flag, size in zip(flags, sizes, strict=True) if size is None]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} missing: give the shape of the model, a --preset, --hf-config or --hf-model"
        )
    num_layers, dim, num_heads = (size or 0 for size in sizes)
    return num_layers, dim, num_heads


def build_decoder(job: Job, vocab_size: int, device: torch.device) -> Decoder:
    """Return the decoder, the same on every rank, in the dtype of its weights; on meta where the job says so."""
    training = job.options.training
    shape = model_shape(job.options.model, vocab_size)
    torch.manual_seed(training.seed)
    with torch.device("meta" if job.options.parallel.init_model_with_meta_device else device):
        decoder = Decoder(shape)
    decoder = decoder.to(torch.float32 if job.engine == "torch_fsdp2" else job.dtype)
    if training.recompute_granularity is not None:
        recompute(decoder, training.recompute_granularity, training.recompute_num_layers)
    return decoder
