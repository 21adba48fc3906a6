"""The decoder of this package for the options of a run."""

from __future__ import annotations

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.models.decoder import Decoder, ModelShape
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.model import ModelOptions


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Round the size of a vocabulary up, as `--make-vocab-size-divisible-by` says."""
    return -(-vocab_size // multiple) * multiple


def model_shape(options: ModelOptions, vocab_size: int) -> ModelShape:
    """Return the shape of the decoder.

    Raises:
        ConfigurationError: A size is missing.
    """
    needed = {name: getattr(options, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    missing = [f"--{name.replace('_', '-')}" for name, value in needed.items() if value is None]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} missing: give the shape of the model, a --preset, --hf-config or --hf-model"
        )
    return ModelShape(
        vocab_size=padded_vocab_size(vocab_size, options.make_vocab_size_divisible_by),
        num_layers=needed["num_layers"],
        dim=needed["hidden_size"],
        num_heads=needed["num_attention_heads"],
        hidden_dim=options.ffn_hidden_size or 4 * needed["hidden_size"],
    )


def build_decoder(job: Job, vocab_size: int, device: torch.device) -> Decoder:
    """Return the decoder, the same on every rank, in the dtype it computes in; on meta where the job says so."""
    shape = model_shape(job.options.model, vocab_size)
    torch.manual_seed(job.options.training.seed)
    if job.options.parallel.init_model_with_meta_device:
        with torch.device("meta"):
            return Decoder(shape).to(job.dtype)
    return Decoder(shape).to(device=device, dtype=job.dtype)
